#!/usr/bin/env bash
# Makes the libraries in this folder again, byte by byte. They are to be read, not to be loaded:
# pages of 64 bytes keep them small. Made with nvcc 13.0.88, g++ and aarch64-linux-gnu-gcc 12.2.0.
#
#   archs.so    x86-64, linked by nvcc: two files, each compiled for several archs
#   gb10.so     aarch64: two fat binaries of sm_121, one of sm_100f as NCCL adds them, and what
#               sm_121 was linked from; soname, needed, rpath, symbol versions
#   stock.so    the same for sm_90, sm_120 and compute_120, as a stock library is
#   modes.so    aarch64: not compressed, LZ4 and zstd, PTX alone, code for link-time optimisation
#   default.so  aarch64: two fat binaries of what nvcc takes where no arch is named
#   lost.so     aarch64, needs libcudart.so.13: sm_90, sm_120 and compute_120, and two kernels, not
#               compressed, for sm_100a and sm_120a
#   hopper.so   aarch64, needs libcudart.so.13: sm_90a alone
#   ptx-CPU.so  for both CPUs, and these can be loaded: PTX alone in zstd and in LZ4; sm_80 beside PTX, not
#               compressed, as FlashAttention 2 is; no code at all; sm_90, sm_120 and PTX
set -euo pipefail
export LC_ALL=C
here=$(cd "$(dirname "$0")" && pwd)
nvcc=${NVCC:-/usr/local/cuda-13.0/bin/nvcc}
work=/tmp/patchkit-libraries # nvcc writes the path into names
rm -rf "$work" && mkdir "$work" && cd "$work"
cp "$here"/*.cu "$here"/*.c .

gencode() { # 121a -> code for sm_121a; +120 -> PTX for compute_120; =121 -> for the linker
  for arch in "$@"; do
    case $arch in
    +*) echo "-gencode=arch=compute_${arch#+},code=compute_${arch#+}" ;;
    =*) echo "-gencode=arch=compute_${arch#=},code=lto_${arch#=}" ;;
    *) echo "-gencode=arch=compute_$arch,code=sm_$arch" ;;
    esac
  done
}

fatbin() { # NAME MODE ARCH... -> NAME.fatbin
  local name=$1 mode=$2
  shift 2
  "$nvcc" -fatbin --compress-mode="$mode" $(gencode "$@") ${RDC:-} ${FILE:-twice}.cu \
    -o "$name.fatbin"
}

library() { # NAME LIVE RELOCATABLE: fat binaries by name, wrapped as a linker of aarch64 would
  {
    echo '.section .nv_fatbin,"a"'
    for name in $2; do printf '.balign 256\n.incbin "%s.fatbin"\n' "$name"; done
    echo '.section __nv_relfatbin,"a"'
    for name in $3; do printf '.balign 256\n.incbin "%s.fatbin"\n' "$name"; done
  } >device.S
  aarch64-linux-gnu-gcc -shared -fPIC -s -o "$here/$1.so" facts.c device.S -lm ${LINK:-} \
    -Wl,-soname,"lib$1.so.2",--build-id,--disable-new-dtags,-rpath,'$ORIGIN/../lib:/opt/nccl' \
    -Wl,-z,max-page-size=64,-z,common-page-size=64,-z,noseparate-code,-z,norelro
}

for file in twice thrice; do
  archs=$([ $file = twice ] && echo 120 121a +120 || echo 100f 120f 121 +120f)
  "$nvcc" -c -Xcompiler -fPIC --compress-mode=size $(gencode $archs) $file.cu -o $file.o
done
"$nvcc" -shared -cudart none twice.o thrice.o -o "$here/archs.so" \
  -Xlinker -s,--build-id,-z,max-page-size=64,-z,common-page-size=64,-z,noseparate-code,-z,norelro

fatbin own size 121
fatbin added size 100f
fatbin stock size 90 120 +120
fatbin speed speed 121 +120
fatbin size size 121
fatbin ptx size +90
fatbin default size
RDC=-rdc=true fatbin parts size 121
RDC=-rdc=true fatbin stockparts size 90 120 +120
RDC=-rdc=true fatbin lto size =121
library gb10 "own own added" "parts"
library stock "stock stock added" "stockparts"
library modes "speed size ptx lto" ""
library default "default default" ""

aarch64-linux-gnu-gcc -shared -o libcudart.so -Wl,-soname,libcudart.so.13 -nostdlib -x c /dev/null
FILE=gemm fatbin gemm none 100a 120a
fatbin hopper size 90a
export LINK='-Wl,--no-as-needed libcudart.so'
library lost "stock gemm" ""
library hopper "hopper" ""
chmod 644 "$here"/*.so

fatbin zstd size +80
fatbin lz4 speed +80
FILE=thrice fatbin plain none 80 +80
fatbin several size 90 120 +120
printf '\120\355\125\272\1\0\20\0\0\0\0\0\0\0\0\0' >empty.fatbin
{
  echo '.section .nv_fatbin,"a"'
  for name in zstd lz4 plain empty several; do
    printf '.balign 256\n.globl %s\n.hidden %s\n%s: .incbin "%s.fatbin"\n' $name $name $name $name
  done
  echo '.skip 16384, 0' # room for a page
  echo '.section .note.GNU-stack,""'
} >records.S
for cpu in aarch64 x86_64; do
  "$cpu-linux-gnu-gcc" -shared -fPIC -s -o "$here/ptx-$cpu.so" records.c records.S -nostdlib \
    -Wl,-soname,libptx.so,--build-id,-z,max-page-size=4096,-z,noseparate-code
done
