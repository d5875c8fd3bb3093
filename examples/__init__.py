"""Example learners: `examples.torch.impala`, and what learners share in `examples.common`."""
