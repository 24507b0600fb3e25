"""Write and read env files, in the formats of the programs that read them."""
