"""What is particular to each model family: parts, names on disk, and the way from config.json to plain numbers.

No other room names a family. Weights, devices and files stay outside.
"""
