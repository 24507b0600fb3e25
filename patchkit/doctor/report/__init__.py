"""Pack what a bug report needs, without what names people, machines and secrets."""
