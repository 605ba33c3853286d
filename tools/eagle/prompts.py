"""Chat prompts for a model to answer: seeded, varied, made of topics × tasks × forms (read
`corpus.py` next, which asks them).

A head learns how a model *writes*, so the prompts need not be clever; they must lead the model
through the kinds of text that users ask of it: explanations, lists, letters, stories, code, sums,
rewriting, and turns that go on from an answer.
"""

from __future__ import annotations

import random

THINGS = """gravity|photosynthesis|the water cycle|volcanoes|earthquakes|black holes|the moon|the solar system|rainbows|lightning|tides
the human heart|the immune system|sleep|memory|dreams|vitamins|vaccines|bacteria|viruses|DNA|evolution|dinosaurs|bees|whales|octopuses|penguins
wolves|migration of birds|coral reefs|rainforests|deserts|glaciers|rivers|oceans|mountains|caves|soil|forests|mushrooms|trees|roses|bread|cheese
coffee|tea|chocolate|pasta|soup|salad|pizza|rice|sushi|cooking for beginners|baking a cake|spices|olive oil|honey|fermentation|breakfast|street food
ancient Egypt|the Roman Empire|ancient Greece|the Middle Ages|the Renaissance|the Industrial Revolution|the French Revolution|the Silk Road
the space race|the printing press|the telephone|the steam engine|the airplane|the internet|electric cars|batteries|solar power|wind power
nuclear energy|recycling|climate change|plastic waste|clean water|artificial intelligence|machine learning|neural networks|robots|computers
operating systems|databases|encryption|passwords|cloud computing|smartphones|social media|video games|open-source software|programming
Python|JavaScript|HTML|version control|algorithms|recursion|sorting|binary numbers|probability|statistics|fractions|geometry|algebra|calculus
prime numbers|percentages|averages|money|saving money|budgets|taxes|inflation|banks|the stock market|small businesses|marketing|customer service
teamwork|leadership|job interviews|writing a CV|public speaking|negotiation|time management|procrastination|habits|goal setting|motivation|stress
meditation|yoga|running|swimming|cycling|hiking|football|basketball|tennis|chess|healthy eating|weight training|first aid|back pain|headaches
friendship|families|raising children|pets|dogs|cats|gardening|house plants|painting|photography|poetry|novels|theatre|films|jazz|classical music
the guitar|the piano|singing|dancing|architecture|bridges|castles|museums|cities|villages|trains|ships|bicycles|travel on a budget|camping|maps
London|Paris|Tokyo|New York|India|Brazil|Egypt|Australia|Canada|Italy|languages|learning English|grammar|spelling|essays|studying for exams
note taking|libraries|schools|teachers|universities|online courses|democracy|elections|laws|human rights|newspapers|advertising|fashion|shoes
furniture|cleaning a kitchen|laundry|moving house|weddings|birthdays|holidays|winter|summer|rain|snow|clouds|stars|time zones|clocks|colours
mirrors|magnets|sound|light|heat|friction|atoms|chemical reactions|metals|glass|paper|cotton|concrete|diamonds|gold|salt|sugar|soap"""
ABOUT = """Explain {a} in simple terms.|What is {a}?|What do you know about {a}?|Tell me about {a}.|Explain {a} to a ten-year-old child.
Write a short paragraph about {a}.|Write two paragraphs about {a}.|Write an introduction to an essay about {a}.|Give me five facts about {a}.
List three good things and three bad things about {a}.|Why is {a} important?|Describe {a} in detail.|What are common mistakes people make with {a}?
What are the most interesting things about {a}?|Give me a summary of the most important points about {a}.|What is the history of {a}?
Write a short poem about {a}.|Write a haiku about {a}.|Write a short story about {a}.|Write a funny story in which {a} plays a part.
What are the advantages and disadvantages of {a}?|How can I learn more about {a}?|Give me ten tips about {a}.|Give me three tips about {a}.
Write a dialogue between a teacher and a student about {a}.|Write a blog post about {a}.|Write a tweet about {a}.|What questions should I ask about {a}?
Write a quiz with four questions about {a}, with answers.|Compare {a} and {b}.|What do {a} and {b} have in common?|Which matters more, {a} or {b}?
Write a letter to a friend about {a}.|Write a formal email to a colleague about {a}.|Write a speech about {a}.|Write a product review about {a}.
Write a news report about {a}.|Define {a} in one sentence.|Explain step by step how to get started with {a}.|Make a weekly plan to learn about {a}.
Suggest five titles for an article about {a}.|Write an advertisement about {a}.|I am interested in {a}. What should I know first?
Can you help me understand {a}?|What would the world be like without {a}?|How has {a} changed over the last hundred years?
Write an outline of a presentation about {a}.|Make a table with facts about {a}.|How does {a} affect our daily life?|How do experts think about {a}?
Describe {a} as if you had never seen it before.|What is a good metaphor for {a}?|Write a conversation between two friends who disagree about {a}."""
PEOPLE = """a young sailor|an old teacher|a tired nurse|a curious child|a lonely robot|a clever fox|a retired detective|a shy baker|a brave mouse
a famous painter|a lost traveller|a strict judge|a cheerful gardener|a poor fisherman|a young queen|a forgetful wizard|a night watchman"""
PLACES = """in a small village by the sea|in a big city at night|on a distant planet|in an old library|in a snowy forest|on a long train journey
in a busy kitchen|at a school for inventors|in the desert|on an island without a name|in a hospital|at a market|in an empty theatre"""
STORIES = """Write a story about {p} {q}.|Write the beginning of a novel about {p} {q}.|Tell me a bedtime story about {p} {q}.
Describe a day in the life of {p} {q}.|Write a scene in which {p} meets {p2} {q}.|Write a poem about {p} {q}.|Write a letter from {p} to {p2}.
Write a monologue of {p} {q}.|Give me an idea for a film about {p} {q}."""
CODE = """reverses a string|checks whether a number is prime|computes the factorial of a number|finds the largest number in a list|counts the words in a text
sorts a list of numbers|removes duplicates from a list|merges two dictionaries|reads a file line by line|computes the average of a list
converts Celsius to Fahrenheit|checks whether a word is a palindrome|generates the first n Fibonacci numbers|finds the sum of the digits of a number
counts the vowels in a string|flattens a nested list|finds common elements of two lists|computes the distance between two points
validates an email address|draws a triangle of stars|simulates the roll of two dice|searches a sorted list|transposes a matrix|groups words by length"""
CODERS = """Write a Python function that {c}.|Write a JavaScript function that {c}.|Write a Python program that {c}, and explain how it works.
How do I write a function that {c}?|Write a Python function that {c}, with a docstring and tests.|Write a C program that {c}.
Explain how to write code that {c}.|Write pseudocode that {c}."""
SUMS = """A shop sells {n} apples at {m} cents each. How much money does it take?|If a train travels {n} kilometres in {m} hours, how fast is it?
What is {n} plus {m}?|What is {n} times {m}?|Anna has {n} marbles and gives {m} to Tom. How many are left?|What is {m} percent of {n}?
A rectangle is {n} metres long and {m} metres wide. What is its area?|I read {m} pages a day. How long do I need for a book of {n} pages?
Solve the equation x + {m} = {n}.|Share {n} sweets among {m} children. Show your working.|What is the average of {n}, {m} and {k}?"""
TEXTS = """Last weekend we went to the beach with our cousins, but it started to rain after an hour and we had to go home early.
The company announced that profits rose by ten percent this year, mainly because of strong sales in Asia and lower costs of energy.
Many people believe that breakfast is the most important meal of the day, although research shows that the evidence is mixed.
I am writing to complain about the washing machine that I bought in your shop last month. It stopped working after two weeks.
The library will be closed on Monday for repairs. Books can be returned at the entrance, and the website will work as usual.
He don't like to going there because the food are bad and the music was too loud for he.
Trees take up carbon dioxide from the air and release oxygen. They also cool cities, protect soil and give a home to animals.
Our team has finished the first version of the app. We still have to test it on older phones and to translate it into Spanish.
The old man walked slowly along the river, looking at the water and thinking about the friends that he had lost in the war.
In my opinion students should not get homework every day, since they need time for sports, for friends and for sleep.
The recipe needs two eggs, a cup of flour, half a cup of sugar and some butter. Mix everything and bake it for thirty minutes.
The new bridge connects both parts of the city. It took four years to build and cost more than twice as much as planned."""
EDITS = """Summarise this text in one sentence:|Rewrite this text in a formal style:|Rewrite this text for a child:|Correct the grammar of this text:
Make this text shorter:|What is the main idea of this text?|Continue this text:|Write three questions about this text:|Translate this text into French:
Turn this text into a list of points:|Give this text a title:|Make this text more polite:|Write an answer to this text:|What is the tone of this text?"""
CHAT = """Hello!|Hi, how are you?|Who are you?|What can you do?|Tell me a joke.|Tell me something interesting.|I feel sad today.|I am bored. What can I do?
Good morning! What should I do today?|I can't sleep. What helps?|Can you help me with my homework?|What is the meaning of life?|Thank you for your help!
I want to learn something new. What do you suggest?|What should I cook tonight?|Recommend a book.|Recommend a film for a rainy day.|Sing me a song.
I have a job interview tomorrow and I am nervous.|My neighbour is very loud. What should I do?|I had a fight with my best friend.|Give me some advice.
What is the capital of {l}?|What is a typical dish of {l}?|Plan a three-day trip to {l}.|Write a postcard from {l}.|What language do they speak in {l}?"""
LANDS = "France|Spain|Japan|Kenya|Peru|Norway|Greece|Turkey|China|Mexico|Poland|Ireland|Thailand|Morocco|Chile|Portugal|Finland|Vietnam|Germany"
FOLLOW_UPS = """Can you explain that in more detail?|Make it shorter.|Give me an example.|Why?|Thank you. What else should I know?|Rewrite that as a list.
Now write it for a child.|Can you give me three more?|What is the most important point?|Are you sure?|Summarise that in one sentence.|Make it funnier.
How would I use this in practice?|Write that in a more formal style.|What could go wrong?|Continue.|Give me a different answer.|And what about the future?"""


def split(text: str) -> list[str]:
    """The entries of a table above."""
    return text.replace("\n", "|").split("|")


def chat_prompts(count: int, seed: int) -> list[str]:
    """`count` different prompts; the same ones for the same seed."""
    rng = random.Random(seed)
    made: dict[str, None] = {}  # a set that keeps its order
    while len(made) < count:
        made[_prompt(rng)] = None
    return list(made)


def _prompt(rng: random.Random) -> str:
    kind = rng.choices(("about", "story", "code", "sum", "edit", "chat"), weights=(60, 12, 9, 6, 9, 4))[0]
    a, b = rng.sample(split(THINGS), 2)
    p, p2 = rng.sample(split(PEOPLE), 2)
    if kind == "about":
        return rng.choice(split(ABOUT)).format(a=a, b=b)
    if kind == "story":
        return rng.choice(split(STORIES)).format(p=p, p2=p2, q=rng.choice(split(PLACES)))
    if kind == "code":
        return rng.choice(split(CODERS)).format(c=rng.choice(split(CODE)))
    if kind == "sum":
        return rng.choice(split(SUMS)).format(n=rng.randint(20, 900), m=rng.randint(2, 20), k=rng.randint(2, 90))
    if kind == "edit":
        texts = rng.sample(TEXTS.split("\n"), rng.choice((1, 1, 2)))
        return f"{rng.choice(split(EDITS))}\n\n{' '.join(texts)}"
    return rng.choice(split(CHAT)).format(l=rng.choice(split(LANDS)))
