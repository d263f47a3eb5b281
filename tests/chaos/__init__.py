"""Real worker processes under real faults, and the verdict over what they did."""
