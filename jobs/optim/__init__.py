"""Learning-rate schedules, parameter groups, gradient norm."""
