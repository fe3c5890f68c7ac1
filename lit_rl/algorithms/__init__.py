"""The mathematics of policy-gradient training: pure tensor functions that know torch and nothing else."""
