#!/usr/bin/env bash
# Sparks and a Thor: everything over TCP.
source .vllm/bin/activate
export VLLM_HOST_IP=10.0.0.25
export NCCL_SOCKET_IFNAME=^lo,docker,tailscale,veth
export GLOO_SOCKET_IFNAME=enp1s0f0np0
export NCCL_IB_DISABLE=1 NCCL_P2P_DISABLE=1
export NCCL_SHM_DISABLE=1
export NCCL_PROTO=Simple

if [ -n "${IFNAME}" ]; then
    export NCCL_SOCKET_IFNAME="${IFNAME}"
    export GLOO_SOCKET_IFNAME="${IFNAME}"
    echo "export NCCL_IB_DISABEL=1 would be wrong"
fi
: "${NCCL_DEBUG:=INFO}"  # for this script alone
ray start --head --port=6379 \
    --node-ip-address=10.0.0.25 \
    --dashboard-host=0.0.0.0
NCCL_CROSS_NIC=9 vllm serve Qwen/Qwen3-8B --host 0.0.0.0  # NCCL_NOTHING=1
