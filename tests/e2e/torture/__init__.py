"""Every change of the disk disturbed at every system call: the state is the old or the new one."""
