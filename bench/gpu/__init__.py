"""What a machine with a GPU is to prove: that CUDA gives what the CPU gives, and how fast."""
