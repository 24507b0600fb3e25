"""Make real faults and whole builds: sessions of nox, which take minutes and more."""
