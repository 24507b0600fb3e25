"""Plan and record patches: Fix, Verdict, Plan, Ledger."""
