"""passes/ir"""
