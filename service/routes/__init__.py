"""HTTP only: bytes in, status out. One module a group of routes; what they answer with comes from
the pipeline.
"""
