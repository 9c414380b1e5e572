"""The file by which each kind of folder is known: a plan, a checkpoint, a model of Hugging Face, and its text."""

PLAN, PLAN_TEXT = "plan.json", "spec.moe"
CHECKPOINT = "checkpoint.json"
HUGGING_FACE = "config.json"
