"""Install and use a wheelhouse for aarch64 on any machine, under qemu-user."""
