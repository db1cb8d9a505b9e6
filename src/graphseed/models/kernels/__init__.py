"""The attention operator and its kernels. Owns arithmetic alone; importing it imports no Triton."""
