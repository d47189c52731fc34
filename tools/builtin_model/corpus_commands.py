"""Facts about the other commands of mlxrunner, the web page, coding agents and API keys.

Knows: answers and the templates of their questions. Must not know: how the server is started and
configured (corpus_server), HTTP routes (corpus_api).
"""

from tools.builtin_model.corpus_facts import FactTemplate

PULL = FactTemplate(
    weight=2.2,
    answers=(
        "`mlxrunner pull qwen3:4b` downloads a model. It takes Ollama's names and those of the "
        "Hugging Face hub, such as mlx-community/Qwen3-4B-4bit.",
    ),
    to=(
        "{download|fetch|pull|get|obtain|grab} {a model|models|a new model|another model|a real model|weights|qwen|qwen3|gemma|llama 3|a qwen model|mistral|qwen3:4b|some model} {from hugging face|from the hub|from the hugging face hub|from the internet|over the network|to this machine|to my disk|by its name|}",
        "{download|fetch|pull} {mlx-community/Qwen3-4B-4bit|a hugging face model|a hub model|a model of mlx-community|a repo from the hub|an ollama model|a model that I do not have yet|a model I don't have}",
        "{install|add} {a model|a new model|another model|qwen3|gemma 3|a hub model|a model from hugging face}{ here| on this machine| on this computer|}",
        "{use|try} {the pull command|mlxrunner pull|ollama's model names|ollama names|hub names}",
    ),
    asks=(
        "{where|from where} {do|can|could|would} I {get|download|find|obtain} {models|a model|other models|bigger models|weights|new models|model files}{ for mlxrunner| from|}?",
        "{what|which} {command|subcommand} {downloads|fetches|pulls|gets|installs} {a model|models|weights|a model from the hub|a new model|something from hugging face}?",
        "{does|can|will} {mlxrunner|it|the server} {download|fetch|pull|get} {models|weights|a model|qwen}{ itself| by itself| for me| from the hub| from hugging face|}?",
        "I {have|own|got} no {model|weights|other model|model file}{ yet| on my disk| on this computer|}, {how do I get one|where do I get one|what downloads one|which command fetches one}?",
        "{do|will|can} {ollama names|names like qwen3:4b|ollama's model names|the names of ollama|names from ollama} {work|work here|be used|be understood}{ too|}?",
        "{the model|qwen3|my model|gemma} is {not on my disk|not here yet|missing|not installed|still on the hub|only on hugging face}, {how do I download it|what now|how does it get here|what do I type}?",
        "what {does|is} {mlxrunner pull|pull|the pull command}{ do| for|}?",
        "{pull|mlxrunner pull|download a model|model download|downloads}{?|}",
        "like {ollama pull|`ollama pull`}, {is there something here|does it exist here|can I do that here}?",
        "how do I {bring|get|load down|copy} {a model|weights|qwen3|a checkpoint} {from the hub|from hugging face|from huggingface.co|off the internet} {to my computer|onto this machine|to my disk|here|}?",
    ),
    about=(
        "{mlxrunner pull|the pull command|downloading models|model downloads|getting models|the hugging face hub|ollama's names}",
    ),
)
RUN_CHAT = FactTemplate(
    weight=1.8,
    answers=(
        "`mlxrunner run qwen3:4b` opens a chat in the terminal. Without a model name, it uses the "
        "first model of the running server, or me.",
    ),
    to=(
        "{chat|talk|have a chat|have a conversation|converse} {in the terminal|in my terminal|on the command line|in the shell|from the console|in a console window|without a browser|at the prompt of my shell}",
        "{chat|talk} with {a model|you|qwen|the model|an llm} {in the terminal|in a shell|on the command line|from my terminal|without opening a browser|over ssh}",
        "{start|open|begin|have} {a terminal chat|a chat in the terminal|an interactive chat|an interactive session|a chat on the command line|a command line chat}",
        "{use|try} {mlxrunner run|the run command}",
    ),
    asks=(
        "{is there|does it have|do you have|does mlxrunner have} {a terminal chat|a command line chat|a chat in the terminal|an interactive mode|a repl|a text interface|a console chat|a chat without a browser}?",
        "{what|which} {command|subcommand} {opens|starts|gives me} {a chat|a chat in the terminal|an interactive chat|a terminal chat|a conversation}?",
        "{can|may|could} {I|we|one} {chat|talk to a model|type messages|talk to you} {in the terminal|in a shell|in bash|on the command line|over ssh|without a browser|without the web page}?",
        "I {have no browser|do not like browsers|work over ssh|live in the terminal|only have a shell|prefer the command line}, {how do I chat|can I still chat|how can I talk to a model|what do I run to talk to you}?",
        "what {does|is} {mlxrunner run|the run command|`mlxrunner run`}{ do| for|}?",
        "{mlxrunner run|terminal chat|chat in a terminal|command line chat|run command}{?|}",
        "like {ollama run|`ollama run`}, {is there something here|how do I do that here|what is it here}?",
    ),
    about=(
        "{mlxrunner run|the run command|the terminal chat|chatting in the terminal|the interactive chat}",
    ),
)
RUN_ONCE = FactTemplate(
    weight=1.6,
    answers=(
        'Put the question after the model\'s name: `mlxrunner run qwen3:4b "Why is the sky blue?"` '
        "prints one answer and ends.",
    ),
    to=(
        "{ask|put} {one|a single|just one|only one} question {on the command line|from the shell|in the terminal|without a chat|to a model|from a script|in a shell script|}",
        "{get|print|have} {one answer|a single answer|just one answer|one reply|a single reply} {in the terminal|on the command line|in the shell|from a script|and exit|and no chat|without a chat}",
        "{use|run|send} {a one-shot prompt|one prompt|a single prompt|one prompt and exit}{ on the command line| from the terminal| in a script|}",
    ),
    asks=(
        "{what|which} {command|line} {asks|puts|sends|answers} {one question|a single question|one prompt|a single prompt}{ and exits| and ends| without a chat|}?",
        "{can|could|does} {mlxrunner run|the run command|it|mlxrunner} {answer|take|handle} {one question|a single question|one prompt|a prompt as an argument|the question as an argument|a one-shot prompt}{ and exit| and then end|}?",
        "I {only want|just want|need only} {one answer|a single answer|a quick answer|one reply}{ in the terminal| in my shell| from a shell script|}, {no chat|without a chat|not a chat|no conversation}, {how|what do I type|which command}?",
        "{one-shot|single|one shot|non-interactive} {prompt|question|answer|mode|run}{ in the terminal| on the command line| from a script|}{?|}",
        "{does|can|will} {mlxrunner|it|the model|qwen} {reply to|answer} {a prompt|one prompt|a question} {inside|in|from} {a makefile|a bash loop|a script|a shell function|an alias|a batch job}?",
        "{call|query|prompt|ask} {the model|qwen|an llm|you} {once|a single time|just once} {in|from|inside} {my script|bash|zsh|a makefile|the shell|a batch job}",
        "{scripted|batch|headless|scripts and} {use|prompts|questions|answers}{ in the shell| without a chat|}{?|}",
        "I {do not need|don't want|skip} {a conversation|an interactive session|the chat}, {just|only} {a reply|one answer|the text} {printed|on stdout|in my shell}, {how|which command|is that possible}?",
        "how {do I|does a script|does a shell script|can I} {ask|put} {a model|qwen|the model} {something|one thing|a question} {and get the answer on stdout|and exit|once|from the shell}?",
    ),
    about=("{one-shot prompts|asking one question in the terminal|a single prompt}",),
)
PIPE = FactTemplate(
    weight=1.6,
    answers=(
        "Pipe the text into `mlxrunner run`, as in `cat report.txt | mlxrunner run qwen3:4b "
        '"summarise"`.',
    ),
    to=(
        "{pipe|feed|send|put|pass|redirect} {a file|text|a log|a document|stdin|standard input|the output of a command|a diff|the output of git diff|my notes} {into|to|through} {a model|the model|mlxrunner|mlxrunner run|it}",
        "{ask|put} {something|a question|questions} about {a file|a log file|a text file|the output of a program|a diff|stdin} {in the terminal|from the shell|on the command line|with a pipe}",
        "{use|work with|combine} {a pipe|pipes|stdin|standard input|unix pipes|shell pipes}{ with mlxrunner| with the model| and a prompt|}",
        "have {a model|it|the model} {read|take} {stdin|standard input|a file|a pipe}{ in the shell| on the command line|}",
    ),
    asks=(
        "{does|can|will} {it|mlxrunner|mlxrunner run|the run command} {read|take|accept|understand|work with} {stdin|standard input|a pipe|pipes|piped text|text from a pipe|the output of another command}?",
        "{are|is} {pipes|stdin|standard input|a pipe|unix pipes} {supported|possible|allowed|usable}{ in the terminal| by run|}?",
        "I have {a text file|a log|a diff|a long report|notes in a file}{ here|}, {how do I pipe it to a model|how does the model read it in the shell|how do I hand it over on the command line|can I pipe it in}?",
        "{git diff|cat file|cat notes.txt|dmesg|curl|a command} {piped into|to|into|with a pipe to} {a model|mlxrunner|mlxrunner run|the model}, {how|is that possible|does that work|what does that look like}?",
        "{pipe|pipes|stdin|piping text|standard input}{?|}",
        "what goes {after|behind} the {pipe|pipe sign|pipe symbol|vertical bar}{ in the shell| to ask a model|}?",
    ),
    about=("{pipes|stdin|piping text into a model|standard input}",),
)
PS = FactTemplate(
    weight=1.3,
    answers=(
        "`mlxrunner ps` lists the models that the running server has loaded, with their memory, "
        "context and expiry.",
    ),
    to=(
        "{see|list|show|check|find out} {which models are loaded|what is loaded|the loaded models|the models in memory|which model is in memory|what models are in memory}{ in the terminal| from the shell| on the command line|}",
        "{see|check|find out} {how much memory each model takes|when a model is unloaded|when a model expires|the memory of each loaded model}",
        "{use|try} {mlxrunner ps|the ps command}",
    ),
    asks=(
        "{what|which} {command|subcommand} {shows|lists|prints} {loaded models|the loaded models|the models in memory|what is in memory|which models are in memory}?",
        "{what|which models} {is|are} {loaded in|currently in|still in|held in} memory{ right now| now|}{, which command|}?",
        "what {does|is} {mlxrunner ps|ps|the ps command}{ do| for| show|}?",
        "{mlxrunner ps|ps|loaded models|ps command}{?|}",
        "like {ollama ps|`ollama ps`}, {is there something here|what is it here}?",
    ),
    about=("{mlxrunner ps|the ps command|loaded models|the models in memory}",),
)
STOP_MODEL = FactTemplate(
    weight=1.3,
    answers=(
        "`mlxrunner stop MODEL` unloads a model of the running server and frees its memory. "
        "The server goes on.",
    ),
    to=(
        "{unload|evict|drop|remove} {a model|one model|the model|qwen3|a loaded model|a model from memory|a model from ram}{ without stopping the server| and keep the server running| from the running server|}",
        "{free|release|get back} {the memory of a model|memory that a model uses|the ram of a model|memory by unloading a model}",
        "{use|try} {mlxrunner stop|the stop command}",
    ),
    asks=(
        "{what|which} {command|subcommand} {unloads|evicts|drops} {a model|one model|a loaded model|the model}?",
        "{a model|qwen3|the big model|one model} {takes|eats|uses|holds|blocks} {too much memory|all my memory|all the ram}, {how do I unload it|how do I get rid of it|can it be unloaded|how do I free that memory}?",
        "{can|could} {I|we} {unload|evict|drop} {a model|one model|a single model} {and|but} {keep the server|leave the server running|let the server run}?",
        "what {does|is} {mlxrunner stop|the stop command|`mlxrunner stop qwen3:4b`}{ do| for|}?",
        "{mlxrunner stop|unload a model|unloading|stop command}{?|}",
    ),
    about=("{mlxrunner stop|unloading models|unloading a model|the stop command}",),
)
LIST = FactTemplate(
    weight=1.4,
    answers=(
        "`mlxrunner list` lists the models on this machine. `mlxrunner rm MODEL` deletes one.",
    ),
    to=(
        "{see|list|show|find out|check} {what I downloaded|which models I downloaded|what is installed|the installed models|which models are installed|which models are on my disk|the models on my disk|the models on this machine|downloaded models}",
        "{delete|remove|erase|uninstall} {a model|a downloaded model|an installed model|old models|a model from my disk|qwen3 from this machine|a model I no longer need}",
        "{use|try} {mlxrunner list|mlxrunner rm|the list command|the rm command}",
    ),
    asks=(
        "{what|which} {command|subcommand} {shows|lists|prints} {installed models|the installed models|downloaded models|the models on my disk|what I downloaded|the models on this machine}?",
        "{what|which models} {do I have|have I downloaded|have I pulled|are installed|are on my disk|did I pull}{ already| on this computer| so far|}{, which command tells me|}?",
        "{my disk is full|I need disk space|a model takes too much disk|models fill my disk}, {how do I delete a model|how do I remove one|which command deletes one}?",
        "what {does|is} {mlxrunner list|the list command|mlxrunner rm|the rm command}{ do| for| show|}?",
        "{mlxrunner list|mlxrunner rm|installed models|downloaded models|delete a model}{?|}",
    ),
    about=("{mlxrunner list|the list command|installed models|downloaded models|deleting models}",),
)
SHOW = FactTemplate(
    weight=1.1,
    answers=(
        "`mlxrunner show MODEL` tells whether the model fits: its size, its context and the memory "
        "that it needs.",
    ),
    to=(
        "{see|find out|check|know|learn} {if|whether} {a model|qwen3|the model|this model|a big model} {fits|fits in memory|fits into my ram|is too big|will fit|fits on this machine}",
        "{see|find out|check} {how much memory a model needs|the size of a model|the context of a model|how big a model is}",
    ),
    asks=(
        "{does|will|would} {a model|qwen3:4b|a 7b model|this model|a big model} {fit|fit in my memory|fit into 16 gb|run with my ram|be too big}{ for this machine|}?",
        "how {much memory|much ram|many gigabytes} {does|will|would} {a model|qwen3|a big model|this model} {need|take|use}?",
        "what {does|is} {mlxrunner show|the show command}{ do| for|}?",
        "{is|what if} {my ram|my memory|16 gb|8 gb} {enough|too little} for {a model|qwen3:4b|a big model}?",
    ),
    about=("{mlxrunner show|the size of a model|whether a model fits|the show command}",),
)
PAGE = FactTemplate(
    weight=2.0,
    answers=(
        "Open http://127.0.0.1:8080 in a browser. The server has a web page there for chats, and "
        "needs no other program.",
    ),
    to=(
        "{chat|talk|chat with you|talk to you|chat with a model} {in a browser|in my browser|in the browser|in firefox|in chrome|in safari|on a web page|with a mouse}",
        "{open|see|find|visit|use|reach} {the web page|the page|the web interface|the web ui|the chat page|the website|the page of the server|the browser chat|the graphical interface}",
        "{have|get|use} {a graphical chat|a chat window|a web chat|a gui|a user interface|a chat ui|a page for my chats}",
    ),
    asks=(
        "{is there|do you have|does it have|does mlxrunner have|has the server} {a web page|a web interface|a web ui|a gui|a graphical interface|a chat page|a website|a page|a frontend|a user interface|a chat window|something with a mouse}{ to chat| for chatting| too|}?",
        "{what|which} {url|address|page|link} {do I open|do I type|do I enter|must I open|goes} {in|into} {my browser|the browser|firefox|chrome|the address bar}?",
        "{can|could|may} {I|we|my kids|my colleague} {chat|use it|talk to you|use you} {in|with|from} {a browser|the browser|firefox|chrome|safari|a web page}?",
        "{what|which} {page|address} {shows|has|is} the chat{ page| in the browser|}?",
        "I {do not like|don't like|hate|am not used to|am afraid of} {the terminal|the command line|consoles|shells|curl}, {is there a page|is there something graphical|can I use a browser|can I click instead|is there a window}?",
        "{must|do} I {install|need|set up} {a chat program|open webui|another program|a frontend|a user interface} {to chat|for a chat|in order to chat}?",
        "{web page|web ui|gui|browser|the page|chat page|web interface|user interface}{?|}",
        "{where|how} {is|do I find|can I see|do I open} {the page|the web page|the web ui|the chat in the browser|the chat window}?",
        "the server {runs|is running|is up|has started}, {how do I chat in my browser|what do I open now|which page do I open|where do I click|what do I open in firefox}?",
    ),
    about=(
        "{the web page|the page|the web ui|the web interface|the chat page|chatting in a browser}",
    ),
)
ENGINE_TAB = FactTemplate(
    weight=1.6,
    answers=(
        "The Engine tab of the page at http://127.0.0.1:8080 shows the running and waiting requests, "
        "the speed, the memory and a drawing of the prefix cache.",
    ),
    to=(
        "{watch|see|observe|follow|look at} {the engine|the engine work|the running requests live|the prefix tree|the prefix cache|the cached prompts|running requests|the cache} {in a browser|in my browser|on the page|on the web page|on a web page|as a picture|drawn}",
        "{see|watch|get} {a picture|a drawing|a diagram|a chart|a live view} of {the prefix cache|the prefix tree|the cache|the engine|the requests|the memory}",
        "{open|use|find|understand} {the engine tab|the second tab|the engine view}",
    ),
    asks=(
        "what {does|is} {the engine tab|the second tab|the engine view|the tab engine}{ show| for| do| on the page|}?",
        "{what|which} {tab|page|part of the page|view} {shows|draws|displays|has} {the prefix tree|the prefix cache|the cached prompts|running requests|the engine|the requests|tokens per second|the memory}?",
        "{is there|does the page have|do you have} {a picture of the cache|a drawing of the prefix cache|a live view of the engine|a view of the running requests|a tab for the engine|a monitor on the page|a graphical monitor|a dashboard}?",
        "{can|could} {I|we} {see|watch} {the prefix tree|the cache|cached prompts|running requests|the engine|tokens per second} {in the browser|on the page|on a web page|drawn|live on the page|graphically}?",
        "{engine tab|prefix tree|the engine view|drawing of the cache}{?|}",
        "{which|what} {tab|view|panel|part of the page} {tells|reports|displays|has} {cache hits|evictions|what is cached|how full the memory is|how well the cache works|the speed|running requests|how many requests wait}{ live|}?",
        "is there a {tab|view|panel} {for|about|with|on} {the cache|the memory|the speed|the requests|the prefixes|the engine}{ on the page| in the browser|}?",
        "what is the {second|other} tab {of|on} the page{ for| about|}?",
        "where {in the browser|on the page|in the page} do I {see|watch|find} {cache hits|how much is cached|how full the memory is|how many requests wait|what the cache holds|the use of the cache}?",
        "{where|how} {does|can} {the page|the web page|the browser} {show|display} {the engine|the cache|the running requests|the prefixes|the speed of the server}?",
        "what {are|do} the {bars|colours|colors|boxes} {in|on} the {engine tab|drawing|engine view|prefix drawing}{ mean|}?",
    ),
    about=("{the engine tab|the prefix tree|the drawing of the prefix cache|the engine view}",),
)
_AGENTS = (
    ("claude", "Claude Code", "{claude code|claude code|claude|anthropic's agent|claude-code}"),
    ("codex", "Codex", "{codex|openai codex|codex cli|the codex agent}"),
    ("opencode", "opencode", "{opencode|open code|opencode-ai}"),
    ("aider", "aider", "{aider|aider chat|aider-chat}"),
    ("cline", "Cline", "{cline|the cline agent|cline cli}"),
    ("continue", "Continue", "{continue.dev|the continue agent|continue cli|the agent continue}"),
)


def _make_agent_fact(program: str, name: str, phrase: str) -> FactTemplate:
    return FactTemplate(
        weight=1.2 if program == "claude" else 0.6,
        answers=(
            f"`mlxrunner launch {program} MODEL` runs {name} with this server. It leaves the "
            "agent's configuration unchanged.",
        ),
        to=(
            f"{{use|run|start|connect|launch|set up|try|point|configure}} {phrase}"
            "{ with mlxrunner| with this server| with a local model| here| with my own model| on my own machine| offline| against this server|}",
            f"{{let|make|have}} {phrase} {{use|talk to|work with}} {{a local model|mlxrunner|this server|you|my model|the server}}",
        ),
        asks=(
            f"I {{use|love|like|work with|want|code with|have}} {phrase}, {{how do I connect it|how does it use a local model|how do I point it here|which command|how does it run on my own models|how do they go together}}?",
            f"{{what|which}} {{command|line}} {{starts|runs|launches|connects}} {phrase}{{ with a local model| with this server|}}?",
            f"{phrase}{{?| setup| support?| with mlxrunner| and mlxrunner| with a local model|}}",
            f"must I {{edit|change|write}} {{the config|settings|the configuration}} of {phrase}?",
        ),
        about=(f"{{using|running|}} {phrase}",),
    )


def _make_agent_support_fact(program: str, name: str, phrase: str) -> FactTemplate:
    """The answer to the question whether an agent works with the server."""
    return FactTemplate(
        weight=0.8 if program == "claude" else 0.4,
        answers=(
            f"Yes, {name} works with this server. `mlxrunner launch {program} MODEL` starts it.",
        ),
        asks=(
            f"{{does|can|will|could}} {phrase} {{work|run|be used|talk|go|function}}{{ here| with mlxrunner| with this server| with a local model| with you| on top of it| together with it|}}?",
            f"{{is|would}} {phrase} {{supported|possible|compatible|ok|fine|usable}}{{ here| with mlxrunner|}}?",
            f"{{does|can|will}} {{mlxrunner|it|the server|this}} {{support|work with|go with|understand|run with|serve}} {phrase}{{ too| as well|}}?",
            f"I {{use|love|like|code with|have}} {phrase}, {{does it work here|can it use a local model|can it run on my own models|is it supported|will that work}}?",
            f"{{are|is}} {{agents|programs|a tool|tools}} like {phrase} {{supported|compatible|possible|ok}}{{ here| with mlxrunner|}}?",
        ),
    )


AGENTS = tuple(_make_agent_fact(*agent) for agent in _AGENTS)
AGENT_SUPPORT = tuple(_make_agent_support_fact(*agent) for agent in _AGENTS)
LAUNCH = FactTemplate(
    weight=1.8,
    answers=(
        "`mlxrunner launch PROGRAM MODEL` runs a coding agent with this server: claude, codex, "
        "opencode, aider, cline or continue.",
    ),
    to=(
        "{use|run|start|connect|launch|set up|try} {a coding agent|coding agents|an agent|a coding assistant|my coding agent|an ai programmer|an agentic coding tool|a programming agent}{ with mlxrunner| with this server| with a local model| with a model of mine| offline|}",
        "{code|program|write software|edit files|work on my repository} with {an agent|a local agent|an ai agent|a coding agent}{ and a local model| offline|}",
        "{use|try} {mlxrunner launch|the launch command}",
    ),
    asks=(
        "{what|which} {coding agents|agents|coding assistants|coding tools|agent programs} {work|are supported|can I use|are there|does it support|does launch know|can be launched|work here|run with mlxrunner}{ with mlxrunner| with this server|}?",
        "what {does|is} {mlxrunner launch|launch|the launch command}{ do| for|}?",
        "{what|which} {command|subcommand} {starts|runs|launches|connects} {a coding agent|an agent|coding agents|a coding assistant}{ with my model| with a local model|}?",
        "{coding agents|coding agent|agents|mlxrunner launch|coding assistants|launch}{?|}",
        "I want {an agent|a coding agent|an ai} {that edits my files|to write my code|to work on my project|to fix bugs in my repo}{ with a local model| without the cloud|}, {how|what do I run|which command}?",
    ),
    about=("{coding agents|mlxrunner launch|the launch command|agents|coding assistants}",),
)
LAUNCH_SUPPORT = FactTemplate(
    answers=(
        "Yes, coding agents work with this server. `mlxrunner launch PROGRAM MODEL` starts claude, "
        "codex, opencode, aider, cline or continue.",
    ),
    asks=(
        "{does|can|will} {mlxrunner|it|the server|this} {run|support|start|work with|serve} {coding agents|a coding agent|agents|coding assistants|agentic tools}?",
        "{do|can|will} {coding agents|agents|coding assistants|ai programmers|agentic tools} {work|run|function|connect}{ here| with mlxrunner| with it|}?",
        "{are|is} {coding agents|an agent|agents|a coding assistant} {supported|possible|compatible}{ here| too|}?",
    ),
)
MAKE_KEY = FactTemplate(
    weight=2.2,
    answers=(
        "`mlxrunner key NAME --file keys.toml` creates an API key and prints it once. Start the "
        "server with `--api-keys keys.toml`, and clients without a key get 401.",
    ),
    to=(
        "{create|make|generate|issue|add|get} {an api key|api keys|a key|a new key|keys|a key for a colleague|a key for a client|keys for my users|a token for a user|an admin key}{ for the server| for mlxrunner|}",
        "{require|demand|enforce|use|switch on|turn on|enable} {api keys|keys|an api key|authentication|a key from every client|access control}{ on my server| for the server|}",
        "{protect|secure|lock|guard|lock down} {the server|my server|mlxrunner|the api|it}{ with a key| with keys| with a password| against strangers| from others|}",
        "{keep|shut} {strangers|others|other people|the rest of the office|unknown clients} out{ of the server| of my server|}",
        "{give|hand out|hand} {a key|an api key|keys|a key of her own} to {anna|a colleague|each user|my team|a friend|everybody in the team}",
        "{let|allow} {only|just} {my team|people with a key|known people|certain users|some people} {in|use the server|use it|call the api}",
    ),
    asks=(
        "{what|which} {command|subcommand} {creates|makes|generates|prints|issues} {an api key|api keys|a key|a new key}?",
        "{what|which} {option|flag|argument|setting} {makes|has|lets} the server {require|demand|check|want|ask for} {keys|api keys|a key|an api key}?",
        "{can|could|how can|how does} {the server|mlxrunner|it} {require|demand|check|ask for|enforce} {api keys|keys|a key|a secret|authentication}?",
        "how {is|can|do I get} {the server|my server|the api} {protected|secured|locked}{ with keys| with a key|}?",
        "what {does|is} {mlxrunner key|the key command|--api-keys|the option --api-keys}{ do| for|}?",
        "what {happens|does a client get} {without a key|with no key|with a wrong key|if the key is missing}{ on a server with keys| when keys are required|}?",
        "{several people|my team|ten colleagues|my whole group|friends} {use|share|will use} {the server|my server|it}, {how does each get a key|how do I hand out keys|can each have a key|how do I give them keys}?",
        "{mlxrunner key|api keys|create a key|--api-keys|new api key|a key for a user}{?|}",
        "{why|how come} {do I|does my client|does my program} get {a 401|401|401 unauthorized|an authentication error}?",
    ),
    about=("{mlxrunner key|api keys|the key command|key files|--api-keys|keys for users}",),
)
REVOKE_KEY = FactTemplate(
    weight=0.8,
    answers=(
        "Remove the table of the key from the key file. The server sees it within a second, without "
        "a restart.",
    ),
    to=(
        "{revoke|withdraw|cancel|invalidate|delete|remove|take back|disable} {a key|an api key|the key of a user|anna's key|an old key|a lost key|a stolen key}",
    ),
    asks=(
        "{a key|my key|an api key|a colleague's key} {was stolen|got lost|leaked|is no longer needed|became public}, {what now|how do I revoke it|how do I make it useless|what do I do}?",
        "how {is|are|do} {a key|keys|api keys} {revoked|withdrawn|removed|taken back}?",
        "must I restart the server {to revoke a key|after I remove a key|when a key is removed}?",
    ),
    about=("{revoking keys|revoking a key|removing an api key}",),
)
BENCH = FactTemplate(
    weight=1.2,
    answers=("`mlxrunner bench` measures the latency and the throughput of the running server.",),
    to=(
        "{measure|benchmark|test|find out} {the speed|the latency|the throughput|the performance|the tokens per second|how fast it is|how fast the server is}{ of the server| of mlxrunner| under load|}",
        "{run|start|make} {a benchmark|a load test|a speed test|a performance test}",
        "{benchmark|load test|stress} {the server|mlxrunner|my model|it}",
        "compare {two servers|the speed of two servers}",
    ),
    asks=(
        "{what|which} {command|subcommand|tool} {measures|benchmarks|tests} {the speed|the latency|the throughput|performance|the server}?",
        "how {fast|quick} {is|are} {the server|mlxrunner|my machine|it}{ here| on my machine| with many clients|}, {how do I measure it|can I measure that|what measures it}?",
        "{is there|do you have} {a benchmark|a load test|a speed test|a benchmark command}?",
        "what {does|is} {mlxrunner bench|bench|the bench command}{ do| for| measure|}?",
        "{mlxrunner bench|benchmark|benchmarks|load test|speed test}{?|}",
    ),
    about=("{mlxrunner bench|benchmarks|the bench command|measuring the speed}",),
)
DOCTOR = FactTemplate(
    weight=1.2,
    answers=(
        "`mlxrunner doctor` checks this machine: MLX, the kernels, the memory, problems and possible "
        "speedups.",
    ),
    to=(
        "{check|diagnose|examine|inspect} {my machine|this machine|my computer|the installation|my installation|my setup|the hardware|the compute backend}",
        "{find out|see|check} {which kernels are used|if mlx uses the gpu|if the kernels are built|why it is slow|what makes it slow|which device is used|if my installation is ok}",
        "{use|try} {mlxrunner doctor|the doctor command}",
    ),
    asks=(
        "{why|how come} {is|are} {it|the server|mlxrunner|the answers|models} so slow{ on my cpu| on my machine| on linux| here|}?",
        "{is|are} {my installation|my setup|the installation|my machine|the kernels} {ok|right|fine|complete|healthy|built}{, which command checks it|, how do I check|}?",
        "{what|which} {command|subcommand} {checks|diagnoses|examines} {my machine|this machine|the machine|the installation|my setup|the hardware}?",
        "what {does|is} {mlxrunner doctor|doctor|the doctor command}{ do| for| check|}?",
        "{mlxrunner doctor|diagnosis|doctor|self test|slow server}{?|}",
        "{can it|could it|how do I make it} {be|run|get} faster{ on my machine| on this cpu|}?",
    ),
    about=("{mlxrunner doctor|the doctor command|a check of my machine|possible speedups}",),
)
COMMANDS = FactTemplate(
    weight=0.9,
    answers=(
        "The commands are serve, run, launch, pull, list, show, rm, cp, ps, stop, bench, doctor, "
        "config, key and completion. `mlxrunner --help` explains them.",
    ),
    asks=(
        "{what|which} {commands|subcommands} {are there|does mlxrunner have|does it have|exist|can I use}{ in mlxrunner|}?",
        "{list|show|name|give me} {all|the|all the|your} {commands|subcommands}{ of mlxrunner|}",
        "what {can|does} {the mlxrunner command|mlxrunner on the command line} do?",
        "where is the {help|documentation|manual} of the {command line|commands}?",
    ),
    about=("{the commands|the subcommands|the command line of mlxrunner|mlxrunner --help}",),
)
APIS = FactTemplate(
    weight=0.9,
    answers=("mlxrunner speaks the HTTP APIs of OpenAI, Anthropic and Ollama.",),
    asks=(
        "{which|what} {apis|protocols|dialects|api formats} {does mlxrunner|does it|does the server|do you} {speak|support|understand|implement|have}?",
        "{does|can|will} {it|mlxrunner|the server} {speak|support|understand|implement} {anthropic's api|the anthropic api|the ollama api|ollama's api|the messages api}?",
        "{do|will|can} {ollama clients|anthropic clients|programs for ollama|programs for anthropic|the anthropic sdk|the ollama library} {work|work here|be used|connect}{ with mlxrunner|}?",
        "{anthropic api|ollama api|messages api|supported apis}{?|}",
    ),
    about=("{the anthropic api|the ollama api|supported apis|ollama's api}",),
)
SERVICE = FactTemplate(
    weight=0.8,
    answers=(
        "deploy/README.md explains how to install mlxrunner as a service, with systemd, launchd or "
        "Docker.",
    ),
    to=(
        "{run|install|set up|deploy} {mlxrunner|the server|it} {as a service|with systemd|with launchd|with docker|in docker|in production|as a daemon|for a team|in a container}",
        "{start|launch} {the server|mlxrunner} {at boot|when my machine starts|automatically|on every boot}",
    ),
    asks=(
        "{is there|do you have} {a docker image|a dockerfile|a systemd unit|a launchd job|a deployment guide|a compose file}?",
        "{docker|systemd|launchd|deployment|production}{?|}",
    ),
    about=("{docker|systemd|launchd|deployment|running it as a service}",),
)
INSTALLED = FactTemplate(
    weight=0.8,
    answers=(
        "`mlxrunner serve --installed` serves every model on this machine. Each one is loaded on its "
        "first request.",
    ),
    to=(
        "serve {all|all my|all of my|several|many|two|every|more than one} {models|installed models|downloaded models} {at once|at the same time|together|}",
    ),
    asks=(
        "can {mlxrunner|it|the server|one server} {serve|have|offer} {several|many|two|all my|more than one} {models|model}{ at once| at the same time|}?",
        "what {does|is} {--installed|serve --installed}{ do| for|}?",
    ),
    about=("{serving several models|--installed|many models at once}",),
)

FACTS = (
    PULL,
    RUN_CHAT,
    RUN_ONCE,
    PIPE,
    PS,
    STOP_MODEL,
    LIST,
    SHOW,
    PAGE,
    ENGINE_TAB,
    LAUNCH,
    LAUNCH_SUPPORT,
    *AGENTS,
    *AGENT_SUPPORT,
    MAKE_KEY,
    REVOKE_KEY,
    BENCH,
    DOCTOR,
    COMMANDS,
    APIS,
    SERVICE,
    INSTALLED,
)
