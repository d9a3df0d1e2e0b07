"""Tokenizers for words, characters and tags, vocabularies from counts or from texts, and packed sequences, without TensorFlow.

Ids of the sequences: 0 is padding (pad), 1 begins a text (bos), 2 ends it (eos), the vocabulary starts at 3, and the last ids
are for unknown words or characters.
"""

from fedsim.text._characters import TFF_SHAKESPEARE as TFF_SHAKESPEARE
from fedsim.text._characters import CharacterTokenizer as CharacterTokenizer
from fedsim.text._farmhash import fingerprint64 as fingerprint64
from fedsim.text._packing import pack as pack
from fedsim.text._tags import TagTokenizer as TagTokenizer
from fedsim.text._vocabulary import vocabulary_from_counts as vocabulary_from_counts
from fedsim.text._vocabulary import vocabulary_from_texts as vocabulary_from_texts
from fedsim.text._words import WordTokenizer as WordTokenizer
