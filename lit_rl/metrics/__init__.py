"""Numbers for loggers: of rollouts, of updates, and of validations."""
