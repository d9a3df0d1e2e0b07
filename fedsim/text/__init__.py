"""Text to integers, without TensorFlow: words, characters, tags; vocabularies from counts or from the texts themselves.

Ids of sequences: 0 pads, 1 begins and 2 ends a text, the vocabulary starts at 3, and what is outside it comes last.
"""

from fedsim.text._characters import TFF_SHAKESPEARE as TFF_SHAKESPEARE
from fedsim.text._characters import CharacterTokenizer as CharacterTokenizer
from fedsim.text._farmhash import fingerprint64 as fingerprint64
from fedsim.text._tags import TagTokenizer as TagTokenizer
from fedsim.text._vocabulary import vocabulary_from_counts as vocabulary_from_counts
from fedsim.text._vocabulary import vocabulary_from_texts as vocabulary_from_texts
from fedsim.text._words import WordTokenizer as WordTokenizer
