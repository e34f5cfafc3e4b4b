"""Check on a GPU that CUDA computes the same as the CPU, and measure its speed."""
