"""What the TPU kernels of attention have in common: a walk over the pages of sequences, in tiles."""
