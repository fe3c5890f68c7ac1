"""Corpus file, index building and the two back ends, on some fifty passages."""

import json

import build_index
import faiss
import numpy as np
import pytest
from corpus_file import CorpusFile
from embedder import FAMILIES, Embedder
from retriever import BM25Retriever, DenseRetriever, check_sizes, load_retriever
from small_corpus import NUM_PASSAGES, write_small_corpus


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return write_small_corpus(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def embedder():
    return Embedder("minilm")


def questions(world, num_passages=NUM_PASSAGES):
    return [question for question in world.questions if max(question.passages) < num_passages]


def test_the_right_passage_is_among_the_first_three_for_every_question(built, embedder):
    corpus_path, index_path, world = built
    retriever = DenseRetriever(index_path, embedder)
    check_sizes(retriever, len(CorpusFile(corpus_path)), index_path, corpus_path)
    asked = questions(world)
    assert len(asked) > 100
    found = retriever.search([question.text for question in asked], topk=3)
    right = [q.passages[0] in [number for number, _ in ranked] for q, ranked in zip(asked, found, strict=True)]
    assert sum(right) / len(right) > 0.97
    for ranked in found:
        scores = [score for _, score in ranked]
        assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("index_type", ["ivf", "hnsw"])
def test_approximate_indexes_find_what_the_exact_one_finds(built, index_type):
    _, index_path, _ = built
    vectors = np.load(index_path.with_name("corpus.embeddings.npy"))
    # More than one list, and a graph of more than one layer.
    vectors = np.concatenate([vectors + 0.01 * shift for shift in range(40)]).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    index = build_index.build_faiss_index(vectors, index_type)
    if index_type == "ivf":
        assert index.nlist > 16
        index.nprobe = 16
    exact = build_index.build_faiss_index(vectors, "flat").search(vectors[:50], 1)[1]
    assert (index.search(vectors[:50], 1)[1] == exact).mean() > 0.9


def test_more_passages_than_there_are_gives_all_of_them(built, embedder):
    _, index_path, _ = built
    [ranked] = DenseRetriever(index_path, embedder).search(["Andorra"], topk=100)
    assert sorted(number for number, _ in ranked) == list(range(NUM_PASSAGES))


def test_an_interrupted_embedding_goes_on_where_it_was(built, embedder, tmp_path, monkeypatch):
    corpus_path, index_path, _ = built
    monkeypatch.setattr(build_index, "BLOCK", 20)
    corpus, path = CorpusFile(corpus_path), tmp_path / "embeddings.npy"
    whole, embedded = embedder.embed_passages, []

    def stops_in_the_second_block(texts, batch_size):
        if len(embedded) == 20:
            raise KeyboardInterrupt
        embedded.extend(texts)
        return whole(texts, batch_size)

    monkeypatch.setattr(embedder, "embed_passages", stops_in_the_second_block)
    with pytest.raises(KeyboardInterrupt):
        build_index.embed_corpus(corpus, embedder, path)
    again = []
    monkeypatch.setattr(embedder, "embed_passages", lambda texts, size: again.extend(texts) or whole(texts, size))
    vectors = build_index.embed_corpus(corpus, embedder, path)
    assert embedded + again == list(corpus.texts(0, NUM_PASSAGES))
    np.testing.assert_allclose(vectors, np.load(index_path.with_name("corpus.embeddings.npy")), atol=2e-2)
    build_index.embed_corpus(corpus, embedder, path)
    assert len(again) == NUM_PASSAGES - 20  # complete: nothing is embedded once more


def test_embeddings_of_another_corpus_are_not_reused(built, embedder, tmp_path, capsys):
    corpus_path, _, _ = built
    path = tmp_path / "embeddings.npy"
    build_index.embed_corpus(CorpusFile(corpus_path), embedder, path)
    other = tmp_path / "other.jsonl"
    other.write_text(corpus_path.read_text().replace("Andorra", "Andarro"))
    vectors = np.array(build_index.embed_corpus(CorpusFile(other), embedder, path))
    assert "another corpus or model" in capsys.readouterr().err
    assert np.abs(vectors[0] - embedder.embed_passages([CorpusFile(other)[0]["contents"]])[0]).max() < 2e-2


def test_words_find_passages_too_and_words_of_no_passage_find_none(built, tmp_path):
    corpus_path, _, world = built
    build_index.main(
        ["--corpus_path", str(corpus_path), "--index_path", str(tmp_path / "bm25"), "--retriever_name", "bm25"]
    )
    retriever = load_retriever(index_path=tmp_path / "bm25", retriever_name="bm25")
    assert isinstance(retriever, BM25Retriever)
    assert retriever.size == NUM_PASSAGES
    found, nothing = retriever.search(["calling code of Andorra", "zzzz qqqq"], topk=2)
    assert world.passages[found[0][0]].text.startswith("The calling code of Andorra")
    assert nothing == []


def test_prefixes_and_pooling_belong_to_the_family(embedder, monkeypatch):
    seen = []
    monkeypatch.setattr(embedder, "family", FAMILIES["e5"])
    monkeypatch.setattr(embedder, "_embed", lambda texts: seen.extend(texts) or np.zeros((len(texts), 384)))
    embedder.embed_queries(["who?"])
    embedder.embed_passages(["him"])
    assert seen == ["query: who?", "passage: him"]


def test_vectors_have_length_one_whatever_shares_their_batch(embedder):
    texts = ["Paris", "Which city is the capital of France, and how many people live there?"]
    together, alone = embedder.embed_queries(texts), embedder.embed_queries(texts[:1])
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1.0, atol=1e-5)
    assert float(together[0] @ alone[0]) > 0.999


def test_a_line_that_is_no_json_is_named_with_its_number(built, tmp_path):
    corpus_path, _, _ = built
    lines = corpus_path.read_text().splitlines()
    for bad, reason in (("{broken", "is no JSON"), ('{"text": "x"}', 'text "contents"'), ("", "is no JSON")):
        path = tmp_path / "bad.jsonl"
        path.write_text("\n".join([*lines[:6], bad, *lines[6:]]) + "\n")
        with pytest.raises(ValueError, match=f"line 7: .*{reason}"):
            CorpusFile(path)


def test_a_last_line_without_newline_counts_and_unicode_survives(tmp_path):
    path = tmp_path / "two.jsonl"
    rows = [{"id": "0", "contents": '"Åland"\nÅland är öar.'}, {"id": "1", "contents": "x\ny", "url": "u"}]
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    corpus = CorpusFile(path)
    assert [corpus[number] for number in range(len(corpus))] == rows


def test_index_and_corpus_of_different_sizes_are_refused(built, embedder, tmp_path):
    corpus_path, index_path, _ = built
    shorter = tmp_path / "shorter.jsonl"
    shorter.write_text("\n".join(corpus_path.read_text().splitlines()[:50]))
    with pytest.raises(ValueError, match=r"has 51 passages, .*shorter.jsonl has 50: they do not belong together"):
        check_sizes(DenseRetriever(index_path, embedder), len(CorpusFile(shorter)), index_path, shorter)


def test_a_model_of_another_dimension_is_refused(embedder, tmp_path):
    path = tmp_path / "other.index"
    index = faiss.IndexFlatIP(768)
    index.add(np.zeros((2, 768), np.float32))
    faiss.write_index(index, str(path))
    with pytest.raises(ValueError, match=r"vectors of 768 numbers, but --retriever_model all-MiniLM-L6-v2 makes 384"):
        DenseRetriever(path, embedder)


def test_files_that_are_missing_or_no_index_are_refused(embedder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"--index_path .*build_index.py writes one"):
        DenseRetriever(tmp_path / "none.index", embedder)
    (tmp_path / "text.index").write_text("this is no index")
    with pytest.raises(ValueError, match="is no faiss index"):
        DenseRetriever(tmp_path / "text.index", embedder)
    with pytest.raises(FileNotFoundError, match="--corpus_path"):
        CorpusFile(tmp_path / "none.jsonl")
    if not hasattr(faiss, "StandardGpuResources"):
        (tmp_path / "x.index").write_text("")
        with pytest.raises(ValueError, match="--faiss_gpu: this faiss is built without GPU support"):
            DenseRetriever(tmp_path / "x.index", embedder, on_gpu=True)
