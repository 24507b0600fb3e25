"""Write a static package index over wheelhouses: pages, metadata, and the wheels beside them."""
