"""Short everyday words, for prompts made without a tokenizer: most tokenizers have a token for each."""

from __future__ import annotations

_TEXT = """
air apple arm art autumn baby back bag ball bank base bath bean bear bed bell belt bench bird black blade block
blood blue board boat body bone book boot bottle bowl box boy branch brass bread brick bridge brother brown brush
bucket bus butter button cake camera candle car card cart cat chain chair chalk cheese chest chin church circle
city clay clock cloth cloud coal coast coat coffee collar color copper cord cork corn cotton cover cow cup curtain
cushion dance day desk dog door dream dress drop dust ear earth edge egg engine eye face family farm father
feather field finger fire fish flag flame floor flower fly foot forest fork fowl frame friend fruit garden girl
glass glove goat gold grain grass green gun hair hammer hand harbor hat head heart hill hole honey hook horn horse
hour house ice iron island jewel journey juice key king kitchen knee knife lake lamp land leaf leather leg letter
library light line lion lip list lock low machine map market mass meal meat metal milk mind mist money month moon
morning mother mountain mouth music nail name neck needle nerve nest net night noise north nose note number oil
orange oven page paint paper park part pen pencil picture pig pin pipe place plane plant plate plow pocket point
pot potato price queen rail rain record red rice ring river road roof room root rose salt sand school sea seat
seed sheep shelf ship shirt shoe silk silver sister skin sky sleep small smoke snow soap sock soup south space
spade spoon spring square star station steam stem step stick stone store storm story street summer sun table tail
thread thumb ticket time tooth town train tree truck valley village voice wall war watch water wave west wheel
wind window wing winter wire woman wood wool word work yard year yellow
"""
WORDS: tuple[str, ...] = tuple(_TEXT.split())
