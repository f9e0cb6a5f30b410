"""C code for the CPU, and what calls it."""
