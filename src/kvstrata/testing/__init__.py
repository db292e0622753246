"""Public helpers for those who test against kvstrata: suites, faults, schedules, models."""
