"""Paraphrases of the questions about facts: synonyms, slang, situations, beginners' and experts'
terms.

Knows: more templates of questions for the facts of corpus_server, corpus_api, corpus_client and corpus_commands.
Must not know: the held-out questions of questions.json.
"""

from tools.builtin_model import corpus_api as api
from tools.builtin_model import corpus_client as client
from tools.builtin_model import corpus_commands as commands
from tools.builtin_model import corpus_server as server
from tools.builtin_model.corpus_facts import FactTemplate


def _paraphrase(
    fact: FactTemplate, *asks: str, to: str = "", route_to: str = "", about: str = ""
) -> FactTemplate:
    """The same answers as `fact`, with different questions."""
    return FactTemplate(
        weight=fact.weight,
        answers=fact.answers,
        asks=asks,
        to=(to,) if to else (),
        route_to=(route_to,) if route_to else (),
        about=(about,) if about else (),
    )


PARAPHRASES: tuple[FactTemplate, ...] = (
    _paraphrase(
        server.FACTS[0],  # what mlxrunner is
        "what {kind|sort|type} of {software|tool|program|thing|application} {is mlxrunner|is this|am I looking at|have I installed|did I clone}?",
        "{give|provide|write} {me|us} {a|the} {short|brief|quick|one sentence} {definition|introduction|description|pitch|overview|summary} of {mlxrunner|this project|this software}",
        "{what's the|what is the} {point|purpose|idea|goal|aim|mission|reason|motivation} {of|behind} {mlxrunner|this project|this repo|this software}?",
        "{why|for what} {would|should} {I|anyone|a developer|somebody} {install|want|bother with|choose|run} {mlxrunner|this software|this project}?",
        "{never heard of mlxrunner|mlxrunner is new to me|I stumbled upon this repo}, {what is it|what's that|enlighten me|fill me in|introduce it}",
        "{mlxrunner|project} {definition|introduction|summary|purpose|overview|meaning|in brief}",
    ),
    _paraphrase(
        server.FACTS[1],  # load another model
        "{where|how} do I {plug in|drop|put|mount|bring|feed in|specify|hand over} {my own|another|a downloaded|a custom|a different|some other} {model|checkpoint|llm|network|set of weights}?",
        "I {downloaded|fetched|pulled|grabbed|cloned|saved} {a model|llama|qwen|mistral|gemma|a checkpoint|safetensors} {from hugging face|to my disk|from the hub|}, {what now|how do I serve it|how do I open it|how do I use it}?",
        "{you are too small|the builtin is too weak|I want something smarter|I need a stronger brain}, {how do I swap you out|how do I switch to a real model|how do I replace you|what do I load instead}?",
        "{which|what} {files|file formats|contents|pieces} {must|should} {a model folder|the model directory|a checkpoint} {contain|have|include|consist of}?",
        "{custom|own|external|bigger|local|huggingface} {model|weights|checkpoint} {folder|path|directory|loading|argument}",
        to="{serve|load|swap in|open|host|deploy|switch to|try out} {another model|my own checkpoint|a larger llm|a model from disk|qwen|llama|mistral|local weights|a safetensors folder|my finetuned model}",
    ),
    _paraphrase(
        server.FACTS[2],  # start the server
        "{how do I|what do I type to} {boot|fire up|spin up|bring up|kick off|power on|switch on|turn on|get going} {the server|mlxrunner|this thing|the daemon|the service}?",
        "{installation is done|I cloned the repo|everything is installed|the setup went through}, {what's next|how do I begin|what is the next step|how do I bring it to life|how do I turn it on}?",
        "{what|which} {command|make target|shell line|terminal command|incantation} {boots|launches|brings up|fires up|starts} {the server|mlxrunner|the service}?",
        "{the server is off|nothing is running yet|it isn't up yet}, how {do I turn it on|can I launch it|do I get it running|do I boot it}?",
        "{startup|launch|boot|start|serve} {command|instructions|procedure|steps|server}",
        to="{boot|fire up|spin up|bring up|kick off|switch on|turn on|relaunch} {the server|mlxrunner|the service|the daemon}",
    ),
    _paraphrase(
        server.FACTS[3],  # stop the server
        "I am {done|finished|leaving} for {today|the day|tonight}, how do I {switch|turn|shut|power} {it|the server|this thing|mlxrunner} {off|down}?",
        "how {do|can} I {kill|terminate|halt|shut down|turn off|switch off|exit|bring down|take down|abort|interrupt} {the server|mlxrunner|the process|the daemon|the service}{ cleanly| safely| gracefully|}?",
        "{which|what} {shortcut|key combination|keystroke|hotkey|signal} {shuts|brings|takes} {the server|mlxrunner|it} down?",
        "{my terminal is blocked|the prompt does not come back|it keeps running|it won't go away}, how do I {get out|kill it|exit|shut it down|abort}?",
        "{graceful|clean|safe|server} {shutdown|exit|termination|stop}",
        to="{kill|terminate|halt|shut down|turn off|switch off|bring down|end} {the server|mlxrunner|the process|the service|the daemon}",
    ),
    _paraphrase(
        server.FACTS[4],  # port
        "{default|standard|tcp|listening|server} port{ number| setting| option|}",
        "{address already in use|bind error|port conflict|8080 is busy|something else occupies 8080}, {help|what can I do|how do I move it|how do I pick a free one}",
        "{which|what} {tcp port|socket|port number} {is opened|is bound|gets occupied|must the firewall allow|should I forward|should docker expose}?",
        "{what number|which digits} {comes|come|goes} after {the colon|localhost:|127.0.0.1:} in the {url|address}?",
        "{is there|what is} {a|the} {flag|switch|argument|parameter|option} for {the port|another port|port selection|a custom port}?",
        to="{move|shift|switch|relocate|bind} {the server|mlxrunner|it} to {another|a free|a custom|a different} port",
    ),
    _paraphrase(
        server.FACTS[5],  # host
        "{host|bind|listen|network|ip} {address|interface|setting|option|flag|exposure}",
        "{my colleague|my phone|my tablet|the other laptop|a coworker|my roommate} {cannot|can't} {open|reach|connect to|see} {the server|mlxrunner}, {why|what do I change|how do I allow it}?",
        "how do I {expose|share|publish|open up|offer} {the server|mlxrunner} {on my lan|over wifi|across the network|to my team|to the household|to the outside}?",
        "is {it|the server|mlxrunner} {limited|restricted|bound|confined} to {localhost|loopback|this pc|my own machine|the local machine}?",
        "can {hackers|strangers|the neighbours|people on the internet|outsiders} {get in|connect|break in|access the server|use my server}?",
        to="{share|expose|publish} {the server|mlxrunner} {on the lan|over the network|to other devices|to remote clients}",
    ),
    _paraphrase(
        server.FACTS[6],  # mac
        "{is|was} {it|mlxrunner} {made|built|optimized|suitable|intended} for {macs|apple computers|apple silicon|macbooks|m series chips}?",
        "{apple|mac|macos|metal} {gpu|acceleration|compatibility|hardware|laptop support|version}",
        "I {bought|got|just unpacked} a {new macbook|mac mini|mac studio|imac}, {is mlxrunner an option|can I install it there|is it suitable|will mlxrunner be happy}?",
        "does {it|mlxrunner} {exploit|leverage|utilize|take advantage of|accelerate with} {metal|the apple gpu|unified memory|apple's chips|the m4 gpu}?",
        "{sonoma|sequoia|os x|an m2 ultra|an m3 max|an m4 pro|m1 pro}, {compatible|any good|does that go|supported}?",
    ),
    _paraphrase(
        server.FACTS[7],  # cuda
        "how do I {activate|enable|exploit|leverage|engage|utilize} {cuda|my nvidia gpu|the geforce|gpu acceleration on linux|the tesla|my rtx 5090|the video card}?",
        "{it is slow on linux|the cpu is too slow|my graphics card sits idle|nvidia-smi shows nothing}, how do I {get the gpu working|make it use cuda|put the card to work|speed it up with my nvidia card}?",
        "{cuda|nvidia|geforce|rtx} {acceleration|backend|build|mode|environment variable|flag|setup|compatibility}",
        "{which|what} {variable|switch|setting|command} {selects|enables|activates|turns on} {cuda|the cuda backend|nvidia|the nvidia gpu}?",
        "{would|will} {an h200|a b200|a tesla t4|an l40s|a gtx 1080|a v100|a 5090} {do|work|be supported|be usable|help}?",
        to="{accelerate|speed up} {mlxrunner|the server|inference} with {cuda|nvidia|a geforce|an rtx card}",
    ),
    _paraphrase(
        server.FACTS[8],  # cpu on linux
        "{my pc|my laptop|the vps|my old thinkpad|the virtual machine|my cloud instance} has {no gpu|no graphics card|only a processor|just an intel cpu|only amd cores}, {is that enough|can I still use it|does it matter|am I out of luck}?",
        "is {a gpu|a graphics card|an accelerator|special hardware} {mandatory|required|obligatory|optional|compulsory|a must}?",
        "{cpu|processor} {only|alone|mode|backend|inference|fallback}",
        "{arch|mint|centos|debian|fedora|ubuntu|opensuse} {without a gpu|on cpu only|with just a processor}, {ok|fine|possible|does it go}?",
        to="{do inference|run mlxrunner|serve} {on plain processors|with only a cpu|on a gpuless machine|on a cheap vps|on an intel xeon}",
    ),
    _paraphrase(
        server.FACTS[9],  # platforms
        "{platform|os|hardware|system} {requirements|support|compatibility|matrix|prerequisites|list}",
        "{which|what} {backends|environments|architectures|combinations of os and hardware} {are covered|are available|exist|work|are compatible}?",
        "{mac or linux|linux or mac|mac, linux or windows}, {which one works|what is supported|where does it run|which do I need}?",
        "{I am a windows user|I only have windows|I am choosing a machine|I want to buy a computer for this}, {what will work|what are my options|which systems are ok|what hardware is suitable}?",
    ),
    _paraphrase(
        server.FACTS[10],  # license
        "{license|licensing|legal|mit|copyright} {type|model|name|terms|file|info}",
        "{our lawyer|legal|my company|compliance|my boss} {asks about|wants to know|needs} the {license|terms of use|legal terms|copyright terms}",
        "{do I|must we|will I} {have to|need to} {pay|buy it|get a subscription|purchase a license|ask permission}{ to use mlxrunner| for this software|}?",
        "is {mlxrunner|this software} {gratis|libre|foss|copyleft|commercial|paid|closed source|permissive|bsd|freeware}?",
        "{may|can} {a startup|my business|I|our firm} {resell|monetize|incorporate|rebrand|distribute|profit from} {mlxrunner|the source|this software}?",
    ),
    _paraphrase(
        server.FACTS[11],  # tests
        "{test|testing|pytest|unit test|test suite} {command|instructions|run|execution|target}",
        "I {fixed a bug|added a feature|refactored a function|touched the code|hacked on the source}, how do I {validate|verify|confirm|prove} {it|nothing broke|that it still works}?",
        "how do I {detect|catch|spot|rule out} {regressions|a regression|breakage|broken code}{ in the project|}?",
        "{does|do} {the test suite|the tests} {need|require|use} {internet|a network|a connection|downloads}?",
        to="{validate|verify|quality check|regression test} {my patch|the codebase|my contribution|my modification|the source}",
    ),
    _paraphrase(
        server.FACTS[12],  # train again
        "{training|retraining|builtin training|make builtin} {command|recipe|script|procedure|duration|instructions}",
        "how do I {teach|educate|school|regrow|reproduce|regenerate} {you|the builtin model|your brain|your weights}{ from scratch| with new data|}?",
        "{your weights are broken|I deleted your weights|I want to teach you new facts|I added new sentences to your corpus}, how do I {rebuild you|recreate them|train you once more|make you learn them}?",
        "does {your training|training you|retraining you} {need|require|take} {a gpu|hours|days|a cluster|a supercomputer|long}?",
        to="{reproduce|regenerate|recreate|redo} {your training|the builtin weights|the tiny model's training|your learning}",
    ),
    _paraphrase(
        api.FACTS[0],  # all endpoints
        "{api|endpoint|route|url|rest} {list|overview|reference|map|documentation|catalog|directory|table}",
        "{which|what} {http methods|rest resources|web addresses|services|interfaces|operations} {are exposed|does the server expose|are implemented|does mlxrunner publish|are on offer}?",
        "{I write a client library|I am exploring the server|I am integrating mlxrunner}, {what endpoints are there|show me the complete api|give me every url|what is the full interface}",
        "{is there|got} {an openapi file|swagger|a cheat sheet of the routes|an api spec|a sitemap}?",
    ),
    _paraphrase(
        api.FACTS[1],  # chat
        "{chat|conversation|dialogue|messages} {endpoint|path|api url|address|route|post}",
        "{where|which endpoint} {handles|processes|answers|receives|accepts} {dialogues|role based messages|user and assistant turns|system and user messages|conversational requests}?",
        "I {have|hold|keep} {a list of messages with roles|a conversation history|user turns|system and user messages}, {where do I post it|which url takes it|what endpoint handles it}?",
        route_to="{converse|hold a dialogue|exchange messages|submit user and assistant turns|talk back and forth|post a system message and a user message}",
    ),
    _paraphrase(
        api.FACTS[2],  # completions
        "{text|plain|raw|prompt|legacy} {completion|completions|continuation} {endpoint|path|url|route|api}",
        "{which|what} {endpoint|route|url} does {autocomplete|free continuation|unformatted prompts|untemplated text|base model completion|prose continuation}?",
        "I {have|give you} {the start of a poem|half a sentence|a beginning|an unfinished paragraph}, {which endpoint finishes it|where do I post it to be continued|which route writes on}?",
        route_to="{autocomplete|prolong|write on from|carry on} {a snippet|an unfinished sentence|a draft|a raw string|the beginning of a text}",
    ),
    _paraphrase(
        api.FACTS[3],  # models
        "{model|models} {list|listing|catalog|inventory|names|endpoint|ids available}",
        "{which|what} {llms|checkpoints|networks|models} {does the server offer|are on offer|can be chosen|are installed here|are hosted|are exposed}?",
        "my {dropdown|model picker|menu|ui} {needs|should show|must display} {the model names|all models|the available models}, {which url|where from|what do I query}?",
        route_to="{discover|retrieve|query|look up|enumerate} {available models|model ids|hosted models|selectable models}",
    ),
    _paraphrase(
        api.FACTS[4],  # status
        "{server|memory|load|progress} {status|statistics|metrics|state|usage|dashboard|telemetry}",
        "{it feels slow|it seems stuck|nothing happens|it hangs}, {how do I see what the server is doing|where do I look at its state|is it busy|is it working on something}?",
        "how {much ram|much vram|many bytes|much memory} {is consumed|is occupied|does the server eat|is in use|is allocated}?",
        route_to="{observe|monitor|inspect|track|graph} {the workload|memory consumption|ram usage|current activity|server metrics|how occupied the server is}",
    ),
    _paraphrase(
        api.FACTS[5],  # tokenize
        "{tokenize|tokenizer|token count|tokenization|encode} {endpoint|route|text|url|api|prompt}",
        "{which|what} {endpoint|call} {chops|splits|cuts|breaks|slices|segments} {text|a sentence|my prompt|strings} into {tokens|pieces|token ids|subwords}?",
        "{I worry about the context limit|I pay attention to prompt size|my prompt is huge}, how do I {count its tokens|measure the token length|get the number of tokens}?",
        route_to="{encode|chop|segment|map} {text|sentences|strings|a paragraph} {to|into} {token ids|subword ids|integer tokens}",
    ),
    _paraphrase(
        api.FACTS[6],  # detokenize
        "{detokenize|decode|token decoding|detokenizer|ids to text} {endpoint|route|url|api|call}",
        "{which|what} {endpoint|call} {reassembles|restores|reconstructs|recovers|rebuilds} {text|the string|readable words|the sentence} from {tokens|ids|token numbers|integers}?",
        "these {integers|token numbers|ids} are {gibberish|unreadable|cryptic} to me, {how do I make them readable|what decodes them|where do I get the words back}?",
        route_to="{decode|reassemble|reconstruct|restore|map back} {token ids|an array of ids|integer tokens} {to|into} {readable text|words|a string}",
    ),
    _paraphrase(
        api.FACTS[7],  # health
        "{health|liveness|readiness|uptime|heartbeat} {check|probe|url|route|ping|monitoring}",
        "{my load balancer|uptime kuma|prometheus|haproxy|systemd|a kubernetes probe} {needs|requires|expects} a {url|path|endpoint|check}, {which one|what do I enter}?",
        "how {can|do} I {tell|detect|verify|confirm} {that the server is alive|it hasn't crashed|mlxrunner is up|the server is responsive|the server has died}?",
        route_to="{verify|detect|confirm} {that the server is alive|liveness|readiness|that it responds|that the server has not crashed}",
    ),
    _paraphrase(
        api.FACTS[8],  # llama.cpp
        "{llama.cpp|llama cpp|llamacpp|llama-server} {compatibility|style|endpoint|api|clients|completion route}",
        "I {come|am migrating|switch} from {llama.cpp|llama-server|llamacpp}, {does my script still work|is there a compatible route|which endpoint is like it}?",
        "{difference|what is the use} of {the plain /completion|/completion without v1|the short completion path}?",
    ),
    _paraphrase(
        client.FACTS[0],  # streaming
        "{streaming|sse|stream|chunked|event stream} {mode|option|flag|parameter|responses|output|request}",
        "my {users|customers|ui|frontend} {hate waiting|should see words instantly|must show text while it is written|needs tokens immediately}, {how do I get that|what do I set|how}?",
        "the {reply|answer|response} {arrives|comes|shows up} {all at once|only at the end|in one block|after a long pause}, how do I {change that|get it gradually|get partial output|see it sooner}?",
        to="{receive|display|print|consume} {partial output|chunks|incremental tokens|deltas|events|words while they are generated}",
    ),
    _paraphrase(
        client.FACTS[1],  # prefix cache
        "{prefix|prompt|kv|key value} {cache|caching|reuse|cache hit|cache benefit}",
        "{why|how come} does the {first|initial} {message|answer|request} take {longer|more time} {than the next|than the following ones}?",
        "what {optimization|trick|mechanism|technique} {avoids|prevents|skips|saves} {recomputing|reprocessing|rereading|prefilling} {the conversation|shared prefixes|the same prompt|my system prompt}?",
        "does {a growing chat|a long history|a repeated preamble|a fixed instruction} {get slower|cost prefill each time|get recomputed|get reused}?",
    ),
    _paraphrase(
        client.FACTS[2],  # openai sdk
        "{openai|sdk|base_url|openai client} {setup|configuration|compatibility|settings|base address|integration}",
        "how do I {redirect|migrate|switch|repoint|hook up} {my openai app|my gpt code|the openai package|llamaindex|langchain|continue.dev|librechat} {to mlxrunner|to this server|from the cloud to here}?",
        "is {mlxrunner|the server} a {drop-in replacement|substitute|stand-in|local alternative} for {openai|the openai api|the gpt api}?",
        to="{redirect|migrate|hook up|repoint|integrate} {the openai sdk|langchain|an openai app|llamaindex|a chat ui}",
    ),
    _paraphrase(
        client.FACTS[3],  # api key
        "{api key|credential|secret|bearer token|authorization header} {needed|required|value|check|mandatory}",
        "{my client|the sdk|the library} {insists on|complains about|demands|asks for} {an api key|a key|a credential|a secret}, {what do I type|which one|can I invent one|is a dummy ok}?",
        "{is there|does it have} {any authorization|access control|a login|security|user accounts|credentials}?",
    ),
    _paraphrase(
        client.FACTS[4],  # model name
        "{model|request model|json model} {identifier|field value|parameter|string|name to send}",
        "{the server says model not found|I get unknown model|my request is refused because of the model}, {what is the right name|which id is valid|what do I send}?",
        "{which|what} {identifier|label|slug|alias|string} {denotes|selects|identifies|picks|addresses} {you|the built-in model} in {a request|the api|json}?",
    ),
    _paraphrase(
        client.FACTS[5],  # curl
        "{curl|shell|command line|bash|wget} {example|snippet|sample|one-liner|request|demo}",
        "{I want to try it from the shell|let me test you in a terminal|I need something to paste}, {show a curl line|what curl command|give me a curl snippet}",
        "how do I {query|poke|contact|hit} {you|the api|the server} from {bash|the shell|the command line|a terminal}?",
    ),
    _paraphrase(
        client.FACTS[6],  # python
        "{python|openai python|py} {snippet|sample|code|script|demo|client example}",
        "{I code in python|I write python|my script is python|I use a jupyter notebook}, {how do I talk to you|show me some lines|what does the call look like|give me a snippet}",
        "how do I {query|contact|invoke|call} {you|the model|the server} {in a notebook|inside a python script|from a .py file|using pip install openai}?",
    ),
    _paraphrase(
        client.FACTS[7],  # sampling
        "{sampling|temperature|top_p|seed|max_tokens|stop sequence} {settings|parameter|option|value|control|default}",
        "your {answers|replies} are {too long|too boring|always identical|too random|too predictable|not creative}, {which knob do I turn|what do I tune|what can I adjust|which parameter helps}?",
        "how do I {control|tweak|tune|adjust|vary} {randomness|creativity|determinism|answer length|diversity|the sampler|output length}?",
        to="{make the output deterministic|tweak randomness|cap the reply length|increase creativity|reduce diversity|tune decoding}",
    ),
    _paraphrase(
        commands.PULL,
        "{model|qwen3|hub|hugging face|ollama} {download|pull|fetch|names|library|repository}{ command| here|}",
        "I {saw|found|like|chose|read about} {a model|qwen3|a nice model|mlx-community/Qwen3-4B-4bit|gemma} {on the hub|on hugging face|on huggingface.co|in ollama's library|on the web}, {how does it come to my machine|how do I acquire it|what brings it here|how do I save it to my disk}?",
        "{before I go offline|before my flight|for later use without internet}, how do I {download a model|fetch the weights|store a model|have a model on my disk}?",
        "{git lfs|huggingface-cli|hf download|wget|ollama} {or|is not needed, or} {what|which command of mlxrunner} {to|do I use to} {get|download|fetch} {a model|the weights}?",
        "{at work|from ollama} I {used|typed|say} {ollama pull|ollama pull qwen3|a pull command}, {what replaces it|is there an equivalent|what do I type here}?",
        "{is|are} {qwen3:4b|gemma3:1b|names with a colon|the tags of ollama} {understood|a valid name|accepted|known}{ here| by mlxrunner|}?",
        to="{acquire|retrieve|transfer|bring|load down|save} {a checkpoint|a model|new weights|qwen3|the weights of a model} {from the hub|from huggingface|from the web|to my drive|for offline use}",
    ),
    _paraphrase(
        commands.RUN_CHAT,
        "{terminal|console|shell|command line|interactive|tty} {chat|session|conversation|mode|chat client|dialog}",
        "I am {logged in over ssh|on a headless box|without a screen|in tmux|in a text console}, {how do I chat|how do I converse with a model|can I still have a conversation}?",
        "how do I {type to|converse with|speak to|message} {a model|an llm|qwen|you} {right in my shell|from the prompt|in iterm|in a terminal window|without http}?",
        "{is a browser necessary|must I use the browser|do I need the page}, or {can I chat in the terminal|does the terminal do|is there a console chat}?",
        to="{converse|have a dialog|exchange messages|talk back and forth} {in the console|in a terminal window|from my prompt|in tmux|over an ssh session}",
    ),
    _paraphrase(
        commands.RUN_ONCE,
        "{single|one-off|one-shot|quick} {question|prompt|query|request} {in bash|in a script|from the command line|in a cron job}",
        "my {script|cron job|makefile|alias} {needs|wants|should get} {one answer|a single reply|the answer to one question}{ from the model|}, {what does it call|which command|how}?",
        "{without entering a chat|and return to my prompt|then exit}, how do I {ask something|put a question to the model|get a reply}?",
        to="{fire off|submit|pose} {one question|a single prompt|a quick query} {and exit|from bash|and return to the shell|in a script}",
    ),
    _paraphrase(
        commands.PIPE,
        "{stdin|pipe|piping|standard input|file} {input|example|support|to a model|in the shell}",
        "{my logs|a csv file|the readme|a stack trace|an email in a file|the output of ls} {should be explained|should be summarised|must be read by the model|need a summary}{ on the command line| in the shell|}, {how do I feed it in|what is the pipe|how do I pass it}?",
        "how do I {summarise|explain|review|condense} {a file|a diff|a log|the output of a command} {from the shell|in the terminal|on the command line|with a pipe}?",
        to="{summarise|explain|review|analyse} {a file|a log|a diff|the output of a program} {with a pipe|in the shell|on the command line|from my terminal}",
    ),
    _paraphrase(
        commands.PS,
        "{loaded|resident|active|warm} {models|model list}{ in memory| of the server|}",
        "{what|which models} {occupies|occupy|sits in|sit in} {the memory|ram|memory} {at present|right now|of the server}{, in the terminal|, on the command line|}?",
    ),
    _paraphrase(
        commands.STOP_MODEL,
        "{unload|evict|eject|drop} {model|command|from memory|a model by hand}",
        "how do I {kick|throw|push|take} {a model|qwen3|the big one} out of {memory|ram|the server}{ but keep serving|}?",
    ),
    _paraphrase(
        commands.LIST,
        "{installed|downloaded|local|available local} {models|weights|checkpoints}{ list| on disk|}",
        "{where do I see|what shows me|how do I review} {everything I downloaded|the models on my drive|my local models|my collection of models}?",
        "how do I {get rid of|throw away|clean up|wipe} {a download|a model on disk|an old checkpoint|qwen3 files}?",
    ),
    _paraphrase(
        commands.SHOW,
        "{model|memory} {size|fit|requirements|details}{ check| command|}",
        "I have {8|16|24|32|64} {gb|gigabytes} of {ram|memory}, {is that enough for a model|which model fits|will qwen3 fit|can I tell if a model fits}?",
    ),
    _paraphrase(
        commands.PAGE,
        "{browser|web|graphical|html} {chat|interface|page|frontend|client|window|ui}",
        "{my mother|my boss|a colleague who does not program|a beginner|my kid} {wants to chat|wants to try it|should talk to the model}{ without a terminal| with a mouse|}, {what do they open|is there a page|where do they click}?",
        "{is there something like|do you have something like} {the chatgpt page|open webui|a chat website|a chat window} {built in|included|in the server|without installing anything}?",
        "what {happens|do I see} {when I open|if I visit|if I go to} {the server's address|127.0.0.1:8080|localhost:8080|the root url} {in a browser|in firefox|with chrome}?",
        "{can it be used|is it usable|does it work} {without a terminal|by mouse|by clicking|on my phone's browser|graphically}?",
        to="{click instead of type commands|use a browser instead of a terminal|see the chat in a window|chat graphically|look at the page}",
    ),
    _paraphrase(
        commands.ENGINE_TAB,
        "{engine|second|live} {tab|view|panel|screen|monitor}{ of the page| in the browser|}",
        "{where|on which tab} {is|can I see} {the tree of prefixes|the cache drawn|the tokens per second live|the waiting requests|the engine at work}{ in the browser|}?",
        "{visualize|visualise|draw|picture} {the prefix cache|the prefix tree|cached prompts|the engine}{ for me| in the browser|}",
        to="{visualize|visualise|watch live|inspect visually} {the prefix cache|the prefix tree|what the engine does|the running requests}",
    ),
    _paraphrase(
        commands.LAUNCH,
        "{coding|programming|ai|local} {agent|agents|assistant} {support|setup|command|integration|list|with local models}",
        "{which|what} {programs|tools|agents} {does launch know|can launch start|can it launch|are known to launch}?",
        "I want to {vibe code|let an ai edit my repository|have an assistant change my files|automate my programming} {locally|without the cloud|with my own model|offline}, {what do I run|how|is there a command}?",
        to="{hook up|integrate|wire up|bring up} {a coding agent|an ai programmer|my coding assistant|an agent}{ with local models| to mlxrunner|}",
    ),
    *(
        _paraphrase(
            fact,
            f"{{hook|wire|plug|connect}} {name} {{up|}} {{to|with}} {{mlxrunner|this server|a local model|my own model}}",
            f"{{my company forbids the cloud|I have no internet|I want no subscription|I want to save money}}, {{can|could|will}} {name} {{use a local model|run against this server|work with mlxrunner}}?",
            f"{{which command|what}} {{gives|gets|brings}} me {name} {{on my own hardware|with a local model|with qwen3|with this server}}?",
            to=f"{{power|drive|feed|back}} {name} with {{a local model|mlxrunner|qwen3|this server|my own hardware}}",
        )
        for fact, name in zip(
            commands.AGENTS,
            ("claude code", "codex", "opencode", "aider", "cline", "continue.dev"),
            strict=True,
        )
    ),
    _paraphrase(
        commands.MAKE_KEY,
        "{api|access|client|user|admin} {key|keys|token|tokens} {creation|command|for users|for a team|required|file|setup}",
        "{I want|we want|my boss wants} {nobody without a key|only people with a key|no strangers|a login|access control|authorization}{ on the server| in the api|}, {how|what do I do|how is it set up|which option}?",
        "{before I open the server to the network|if others can reach the server|on a shared machine|when I listen on 0.0.0.0}, how do I {require keys|protect it|secure it|make keys|demand a key}?",
        "how do I {equip|provide|supply} {my users|each colleague|a client|every program} with {a key|keys|credentials|a token}?",
        to="{authenticate|authorize|restrict|control} {clients|users|access|callers|who may call the api}",
    ),
    _paraphrase(
        commands.REVOKE_KEY,
        "{revoke|revocation|remove|lost|leaked} {key|api key|credential}",
        "a {colleague|user|client} {left|quit|must not use it any more}, {how do I take the key away|what about the key|how do I block the key}?",
    ),
    _paraphrase(
        commands.BENCH,
        "{latency|throughput|tokens per second|performance} {measurement|numbers|test|figures|under load}",
        "how many {requests|users|clients|tokens per second} {can it handle|can the server take|does my machine manage}, {how do I measure|what tells me|can I test that}?",
    ),
    _paraphrase(
        commands.DOCTOR,
        "{machine|installation|setup|backend|health of the installation} {check|diagnosis|report|problems}",
        "{something is wrong with|I am not sure about|I doubt} {my installation|my setup|the kernels|my machine}, {what checks it|which command helps|how do I diagnose it}?",
        "{answers crawl|it is terribly slow|only two tokens per second|the cpu is slow}, {what can I check|which command finds the cause|why}?",
    ),
    _paraphrase(
        server.FACTS[1],  # load another model
        "a {qwen|llama|gemma|mistral|phi} {folder|directory|checkpoint} {lies|is|sits|waits} {in my home directory|on my second drive|in ~/models|next to me on disk|among my files}, {how does it get served|how can the server take it|how would I bring it up|what starts it}?",
        "I would {rather|prefer to} {use|have|talk to} {something bigger|a stronger model|a model of mine|the weights on my disk}, {how do I bring it in|how is it served|what is the command}?",
        "{my own|trained|merged|converted} {weights|safetensors|checkpoint} {in|into} {the server|mlxrunner}, {how|what do I do|which command serves them}?",
    ),
    _paraphrase(
        server.FACTS[5],  # host
        "{can|could|does|will} {the whole|my entire|our} {office|school|family|network|company|dorm|floor} {see|reach|use|open|access} {it|the server|mlxrunner}{ by default| out of the box| now|}?",
        "{is it|am I|is mlxrunner} {open|exposed|visible|public|safe} {on the wifi|to my coworkers|to everyone around|in the office|on this network|from other rooms}?",
        "{who else|which other machines|what other computers} {can|could|may} {see|reach|use|call} {it|the server|my server}?",
    ),
    _paraphrase(
        server.FACTS[6],  # mac
        "would {a used|an older|the cheapest|the newest|my wife's} {mac|macbook|mac mini|macbook pro|mac studio} {be ok|be fine|do|suffice|be enough|work out}?",
        "{apple|a mac|an apple machine|my macbook pro|macs} {ok|fine|welcome|good enough|possible|too}?",
    ),
    _paraphrase(
        server.FACTS[7],  # cuda
        "I {put|built|plugged|installed} {a geforce|an nvidia card|a 3060|a tesla|a graphics card} {in|into} my {linux box|pc|debian server|home server}, {how do I get it used|can mlxrunner see it|will it help|what enables it}?",
        "{get|make|let} {it|mlxrunner|the server} {use|run on|exploit} {the geforce|my nvidia card|the rtx|the gpu of my linux box|cuda}",
    ),
    _paraphrase(
        api.FACTS[0],  # all endpoints
        "{everything|all that|whatever} {I|a client|a program} {can|could|may} {call|request|reach|send requests to} {over http|on the server|here}",
        "{the full|a complete|an exhaustive} {list|table|set} of {endpoints|routes|urls|paths|http calls}",
    ),
    _paraphrase(
        api.FACTS[2],  # completions
        "{is there|have you|do you have} {anything|something|an endpoint|a path} for {untemplated|bare|raw|unformatted|plain} {prompts|text|strings|input}{, without chat roles|, no messages at all|, not a conversation|}?",
        "{only|just} {a bare string|one raw prompt|plain words}, {without|with no|no} {roles|messages|chat|template}, {where|which endpoint|how}?",
    ),
    _paraphrase(
        api.FACTS[4],  # status
        "{is there|have you|give me} {a url|an endpoint|a path} {with|for|that shows} {the load|the activity|the state of the server|memory and requests|what it does}",
        "{how do I|can I|where do I} {see|tell|learn} {whether it does anything|what the server has on its hands|how loaded it is|what its state is|how much it has to do}{ over http|}?",
    ),
    _paraphrase(
        client.FACTS[0],  # streaming
        "I would {rather not|prefer not to|hate to} {wait|sit and wait|stare at nothing} {for the end|until it is complete|till the last word}, {can it come bit by bit|can parts come earlier|can words trickle in|is there a stream}?",
        "{can|could|may|will} {the reply|it|the text|an answer} {trickle in|drip in|appear gradually|come in small parts|flow in word for word|be shown early}?",
    ),
    _paraphrase(
        client.FACTS[2],  # openai sdk
        "{the official|my|the normal|python's|the usual} openai {library|client|package|module|sdk} {needs|wants|asks for|takes|gets} {a url|an address|a base url|an endpoint}, {which one|what is it|what do I hand over|what do I write}?",
        "{what|which} {address|url|base} {do I|shall I|must I} {hand|give|tell|feed} {to the|the} {openai library|openai sdk|openai client|official client}?",
    ),
    _paraphrase(
        commands.PULL,
        "{gemma|qwen|llama|mistral|phi|a model that I like} {is|is still} {not on my laptop|not on this disk|only online|somewhere online|not here}{ yet|}, {how do I get it|what brings it here|what now|which command}?",
        "{can|may|do} I {write|type|use} {llama3.2|gemma3:4b|qwen3|names with tags|the short names} {as in|like in|of|from} ollama?",
    ),
    _paraphrase(
        commands.ENGINE_TAB,
        "{somewhere|in a screenshot|on a picture} I saw {the cache|cached prompts|bars for the prefixes|the engine} {drawn|as bars|with colours|as a picture}, {where is that|what was that|how do I open it}?",
        "{which|what} part of the {page|web page} {draws|visualizes|shows} {the cache|prefixes|the engine|waiting requests}?",
    ),
    _paraphrase(
        commands.MAKE_KEY,
        "{only|just} {people I know|my friends|my own team|invited people|known clients} {should|may|shall|must} {use|reach|call|enter} {my server|the server|it}, {how|how do I do that|how do they identify themselves|how do they log in}?",
        "{a new|another|the next} {colleague|member|teammate|student|employee} {joins|starts|arrives|needs access|wants in}{ today| tomorrow| next week|}, {what do I do|how do I give access|what do I create|how do they get a key}?",
        "{bob|eve|maria|my brother|our intern} needs {a key|credentials|access|a login|an account of their own|a token}{ for the server|}, {how|what do I run|what do I do|which command}?",
    ),
    _paraphrase(
        commands.LAUNCH,
        "{can|could|is it possible that} an {ai|agent|assistant} {works|codes|programs} {on my project|in my repository|with my files} {with|through|on} {a local model|my own machine|this server}?",
    ),
    _paraphrase(
        commands.AGENTS[0],
        "is it possible {to have|to get|that} claude code {run|to run|running|runs} {on my own model|on a local model|with a model of mine|on this server|locally}?",
        "{anthropic's coding agent|claude code|claude} {without the cloud|locally|on a model of mine|on my hardware}{, how|, possible|}?",
    ),
    _paraphrase(
        commands.PS,
        "{which|what} {models|model} {is|are} {sitting|staying|held|kept|alive} in {ram|memory|the server's memory}{ at this moment| at present| now|}?",
    ),
    _paraphrase(
        commands.DOCTOR,
        "{something|anything} {is|seems|looks} {off|odd|wrong|broken} with my {installation|setup|machine|install}, {who can tell me why|what examines it|how do I find out|what do I run}?",
        "everything {crawls|is slow|takes ages|is sluggish}{ here|}, {what tells me why|what can I run|how do I find the reason}?",
    ),
)
