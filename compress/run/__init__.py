"""Code that all jobs share: options, checked inputs, work directory, figures and result.

The work of each job is in its own file. Start with `job.py`.
"""
