"""Distillation of language models: recipes, responses, teachers and student-aware routing.

Start with `recipes.py`.
"""
