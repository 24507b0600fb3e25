"""Find in what programs print the symptoms that are known, and decide what caused them."""
