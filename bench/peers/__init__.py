"""Servers around CTranslate2 as its users write them: they take the same requests and return text
and tokens.
"""
