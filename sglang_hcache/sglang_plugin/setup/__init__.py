"""The scheduler's process, from the loaded model to a tier that serves: check, measure, plan, assemble."""
