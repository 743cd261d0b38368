"""Learned policies: DRLM's factorised one, and one that scores candidates with shared weights."""
