"""``hcache plan``: what the planner would do for a model on a machine."""
