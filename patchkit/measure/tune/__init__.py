"""Search and measure fused-MoE configs on the present GPU."""
