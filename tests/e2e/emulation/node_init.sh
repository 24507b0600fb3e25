# Process 1 of an emulated node, which unshare has given its own network, PID, mount, UTS and IPC
# namespaces. $1 is the node's name, $2 its folder, which holds three files for /etc; what follows are the
# folders below /tmp that it sees. Prints its PID as the world outside has it, when all is done.
set -e
name=$1 folder=$2
shift 2
read -r pid _ < /proc/self/stat # the old /proc is still there
mount -t proc proc /proc
mount -t sysfs sysfs /sys # shows the interfaces of the namespace that mounts it
mount -t tmpfs -o size=4g tmpfs /dev/shm
mount -t tmpfs tmpfs "$folder/tmp"
for shared; do
  mkdir -p "$folder/tmp/${shared#/tmp/}"
  mount --bind "$shared" "$folder/tmp/${shared#/tmp/}"
done
for file in hosts hostname resolv.conf; do mount --bind "$folder/$file" "/etc/$file"; done
mount --move "$folder/tmp" /tmp
chmod 1777 /tmp
mkdir /tmp/home
hostname "$name"
# Nobody answers: on an idle interface they would be most of what the counters show.
echo 0 > /proc/sys/net/ipv6/conf/default/router_solicitations
echo "$pid"
exec > /dev/null
while :; do # reaps whoever lost its parent
  sleep 3600 &
  wait $!
done
