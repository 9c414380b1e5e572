"""The planner's cost model against published rows: their files as `.moe` text, and the scores of predictions."""
