"""What the learners share whatever their framework: configuration, environments, unrolls,
statistics, terminal output, checkpoints. Nothing here imports torch or jax."""
