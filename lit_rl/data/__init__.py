"""Prompts and demonstrations: where they come from, in which order they are used, and how they become token ids."""

from lit_rl.data.arithmetic import Arithmetic
from lit_rl.data.chat_template import ChatTemplate, ChatTemplateError
from lit_rl.data.conversation_rows import AnsweredPrompts, Conversation, ConversationFiles, ConversationSource
from lit_rl.data.conversation_tokens import ConversationTokens, tokenize_conversation
from lit_rl.data.hugging_face import HuggingFaceDataset
from lit_rl.data.overlong import OverlongCounts, WithoutOverlong
from lit_rl.data.prompt_cursor import PromptCursor, fingerprint
from lit_rl.data.prompt_dataset import PromptFiles
from lit_rl.data.prompt_rows import PromptRowError, PromptSource
from lit_rl.data.reasoning_gym import ReasoningGym

__all__ = [
    "AnsweredPrompts",
    "Arithmetic",
    "ChatTemplate",
    "ChatTemplateError",
    "Conversation",
    "ConversationFiles",
    "ConversationSource",
    "ConversationTokens",
    "HuggingFaceDataset",
    "OverlongCounts",
    "PromptCursor",
    "PromptFiles",
    "PromptRowError",
    "PromptSource",
    "ReasoningGym",
    "WithoutOverlong",
    "fingerprint",
    "tokenize_conversation",
]
