import os

os.environ["NCCL_IB_HCA"] = "rocep1s0f0,roceP2p1s0f0"
os.environ.setdefault("NCCL_IB_SUBNET_AWARE_ROUTING", "1")
os.environ["VLLM_HOST_IP"] = os.environ["OWN_ADDRESS"]
runtime_env = {"env_vars": {"NCCL_P2P_DISABEL": "1", "VLLM_LOGGING_LEVL": "DEBUG"}}
