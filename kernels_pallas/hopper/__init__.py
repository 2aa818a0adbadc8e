"""What kernels for NVIDIA GPUs of the Hopper generation share, on Pallas' Mosaic GPU backend."""
