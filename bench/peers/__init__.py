"""Servers around CTranslate2 as its users write them: the same text in, text and tokens out."""
