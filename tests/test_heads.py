"""What the heads of a real model look at, on the layers that come with the package."""

import io
import json
import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console
from typer import Typer
from typer.testing import CliRunner

import attnspec
from attnspec.heads.command import heads
from attnspec.heads.habits import habit
from attnspec.heads.replay import replay
from attnspec.heads.rounding import allowances
from attnspec.heads.run import Layer
from attnspec.heads.shipped import TEXT, shipped
from attnspec.heads.show import comparison, head_view, layer_view, summary

TOKENS = ("[CLS]", "the", "cat", "sat", "on", "the", "mat", "[SEP]")
CLS, CAT, SAT, ON, MAT = 0, 2, 3, 4, 6

app = Typer()
app.command()(heads)


@pytest.fixture(scope="module")
def replays():
    return {layer.index: replay(layer) for layer in shipped().layers}


def command(*arguments):
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "80"})


def printed(view, width=80):
    console = Console(width=width, file=io.StringIO())
    console.print(view)
    return console.file.getvalue()


class TestShipped:
    def test_three_layers_of_the_model_with_twelve_heads_each(self):
        run = shipped()
        assert run.tokens == TOKENS
        assert [layer.index for layer in run.layers] == [0, 1, 5]
        for layer in run.layers:
            assert layer.parameters.heads == attnspec.Heads(d_model=384, h=12)
            assert layer.x.shape == (1, 8, 384)
            assert {array.dtype for array in vars(layer.parameters).values() if array is not None} == {np.dtype("float32")}

    def test_another_text_is_refused_and_the_way_out_is_named(self):
        with pytest.raises(
            attnspec.ConfigError, match="kept for 'the cat sat on the mat' only, not for 'a dog'; --model DIR runs any text"
        ):
            shipped("a dog")

    def test_the_specification_computes_what_pytorch_computed(self, replays):
        for replayed in replays.values():
            assert set(replayed.distances) == {"blend", "mix"}
            assert replayed.is_rounding
            assert replayed.distances["blend"].difference < 3e-6  # 13 times the spacing of float32 at 2, their magnitude


class TestNamedHeads:
    """The weights of the real model in float32; the parameters are stored in float16, which moves them by at most 0.0004."""

    def test_layer_0_head_2_looks_at_the_previous_word(self, replays):
        weights = replays[0].weights[2]
        assert weights[SAT, CAT] == pytest.approx(0.9998, abs=4e-4)
        assert np.diag(weights, -1).min() > 0.998  # of every word, at every place
        assert weights[CLS, CLS] > 0.998  # which has no previous word

    def test_layer_1_head_8_looks_at_the_next_word(self, replays):
        weights = replays[1].weights[8]
        assert weights[SAT, ON] == pytest.approx(0.7659, abs=4e-4)
        assert np.diag(weights, 1)[1:6] == pytest.approx([0.722, 0.604, 0.766, 0.884, 0.836], abs=1e-3)
        assert weights[MAT].argmax() == CLS  # at the end of the sentence, where the next word is [SEP]

    def test_layer_5_head_11_looks_at_the_cat_whoever_asks(self, replays):
        weights = replays[5].weights[11]
        assert weights[SAT, CAT] == pytest.approx(0.8913, abs=4e-4)
        assert (weights.argmax(axis=-1) == CAT).all()  # so it is no matter of the verb and its subject

    def test_most_heads_look_at_cls(self, replays):
        habits = [habit(one.weights[head], one.keep[head], TOKENS) for one in replays.values() for head in range(12)]
        assert sum(found.name == '"[CLS]"' for found in habits) == 27  # of 36


class TestHabit:
    ALL = np.ones((5, 5), bool)

    @staticmethod
    def looking(*favourites):
        weights = np.full((len(favourites), 5), 0.1)
        weights[np.arange(len(favourites)), favourites] = 0.6
        return weights

    def test_previous_next_and_itself(self):
        assert str(habit(self.looking(0, 0, 1, 2, 3), self.ALL, "abcde")) == "previous word (4 of 5 words, weight 0.60)"
        assert str(habit(self.looking(1, 2, 3, 4, 4), self.ALL, "abcde")) == "next word (4 of 5 words, weight 0.60)"
        assert str(habit(self.looking(0, 1, 2, 3, 4), self.ALL, "abcde")) == "itself (5 of 5 words, weight 0.60)"

    def test_one_word_is_quoted_and_has_its_place_if_it_comes_twice(self):
        assert habit(self.looking(2, 2, 2, 2, 2), self.ALL, ["[CLS]", "a", "itself", "b", "c"]).name == '"itself"'
        assert habit(self.looking(2, 2, 2, 2, 2), self.ALL, ["a", "b", "a", "b", "c"]).name == '"a" at 2'

    def test_half_of_the_words_are_no_pattern(self):
        found = habit(self.looking(0, 0, 0, 3), np.ones((4, 5), bool), "abcde")
        assert (found.name, found.hits, found.words) == ('"a"', 3, 4)
        assert str(habit(self.looking(0, 0, 4, 3), np.ones((4, 5), bool), "abcde")) == "no one pattern"

    def test_a_word_without_a_choice_does_not_count(self):
        found = habit(self.looking(0, 0, 1, 2, 3), np.tri(5, dtype=bool), "abcde")
        assert (found.name, found.hits, found.words) == ("previous word", 4, 4)


class TestRounding:
    @staticmethod
    def layer(dtype, *, own=np.float64, **options):
        parameters = attnspec.Parameters.random(attnspec.Heads(d_model=42, h=6, h_kv=3, d_k=7, d_v=5), seed=1)
        x = np.random.default_rng(2).normal(size=(2, 11, 42))
        with attnspec.trace() as steps:
            attnspec.multi_head_attention(x.astype(own), parameters.map(lambda array: array.astype(own)), **options)
        blended, y = steps["blend"].result.astype(dtype), steps["mix"].result.astype(dtype)
        return Layer(3, x.astype(dtype), parameters.map(lambda array: array.astype(dtype)), None, blended, y, **options)

    @pytest.mark.parametrize("options", [{}, {"causal": True}, {"scale": 8 / 7}])
    def test_float32_is_within_what_rounding_explains_of_float64(self, options):
        replayed = replay(self.layer(np.float32, **options))
        assert replayed.is_rounding
        assert replayed.distances["blend"].difference > 0

    def test_a_thousandth_of_the_scale_is_no_rounding(self):
        layer = self.layer(np.float32)
        with attnspec.substitute(scale=lambda scores, /, **options: attnspec.scale(scores, **options) * 1.001):
            replayed = replay(layer)
        assert not replayed.distances["blend"].is_rounding

    def test_it_grows_with_the_unit_of_the_dtype(self):
        allowed = {}
        for dtype in (np.float32, np.float64):
            allowed[dtype] = allowances(replay(self.layer(dtype)).steps)["blend"].max()
        assert allowed[np.float32] / allowed[np.float64] == pytest.approx(2**29, rel=1e-3)

    def test_it_follows_the_scale_of_the_scores(self):
        steps = replay(self.layer(np.float64)).steps
        usual, same, larger = (allowances(steps, scale=scale)["blend"] for scale in (None, 7**-0.5, 1.0))
        np.testing.assert_allclose(usual, same)
        assert (larger > 2 * usual).all()

    def test_a_layer_needs_parameters_or_queries(self):
        layer = self.layer(np.float32)
        with pytest.raises(attnspec.ConfigError, match="layer 3 has neither parameters nor queries"):
            replay(Layer(3, layer.x, None, None, layer.blended))


class TestViews:
    def test_a_head_is_a_table_of_words_by_words(self, replays):
        lines = printed(head_view(replays[1], 8, TOKENS, width=80)).splitlines()
        assert lines[0] == "Layer 1, head 8: next word (5 of 8 words, weight 0.76)"
        assert lines[1].split() == list(TOKENS)
        assert lines[5].split() == ["sat", "0.11", "·", "·", "0.08", "0.77", "0.04", "·", "·"]

    def test_where_the_words_do_not_fit_each_has_a_line(self, replays):
        lines = printed(head_view(replays[1], 8, TOKENS, width=50)).splitlines()
        assert lines[5].rstrip().split(maxsplit=2) == ["3", "sat", "4 on 0.77, 0 [CLS] 0.11, 3 sat 0.08"]

    def test_a_layer_has_a_line_for_each_head(self, replays):
        wide, narrow = printed(layer_view(replays[5], TOKENS, width=80)), printed(layer_view(replays[5], TOKENS, width=60), width=60)
        assert '11 "cat" cat cat cat cat cat cat cat cat' in " ".join(wide.split())
        assert '11 "cat" (8 of 8 words, weight 0.78)' in narrow

    def test_the_summary_gathers_the_heads(self, replays):
        lines = [" ".join(line.split()) for line in printed(summary(replays.values(), TOKENS)).splitlines()]
        assert "previous word 2 7 of 8 1.00" in lines
        assert '"cat" 4 11 7-8 of 8 0.44-0.78' in lines

    def test_nothing_is_wider_than_the_terminal(self, replays):
        views = [head_view(replays[0], 2, TOKENS, width=80), layer_view(replays[0], TOKENS, width=80), summary(replays.values(), TOKENS)]
        for view in [*views, comparison(shipped(), list(replays.values()))]:
            assert "…" not in (text := printed(view))
            assert max(map(len, text.splitlines())) <= 80

    def test_weights_are_shaded_where_there_is_colour(self, replays):
        console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system="truecolor", legacy_windows=False)
        console.print(head_view(replays[0], 2, TOKENS, width=80))
        assert "48;2;30;58;138m 1.00" in console.file.getvalue()  # the deepest ground


class TestCommand:
    def test_the_overview_has_the_books_the_named_heads_and_all_others(self):
        result = command()
        assert result.exit_code == 0
        for part in ("project_queries", "Layer 0, head 2: previous word", "Layer 1, head 8: next word", 'Layer 5, head 11: "cat"'):
            assert part in result.output
        assert "NOT ROUNDING" not in result.output
        assert "stored in float16" in result.output

    def test_one_layer_and_one_head(self):
        assert "Layer 1, head 8" not in (layer := command("--layer", "1").output)
        assert "Layer 1: what each word (column) looks at most" in layer
        assert "Layer 5, head 11" in command("--layer", "5", "--head", "11").output

    def test_json_is_plain_data(self):
        data = json.loads(command("--json").output)
        assert data["tokens"] == list(TOKENS)
        assert [layer["layer"] for layer in data["layers"]] == [0, 1, 5]
        head = data["layers"][2]["heads"][11]
        assert head["weights"][SAT][CAT] == pytest.approx(0.8913, abs=4e-4)
        assert head["most_look_at"]["name"] == '"cat"'
        assert data["is_rounding"] is True
        assert 0 < data["difference"] < 3e-6

    def test_json_of_one_head(self):
        (layer,) = json.loads(command("--json", "--layer", "1", "--head", "8").output)["layers"]
        assert [head["head"] for head in layer["heads"]] == [8]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["a dog"], "--model DIR runs any text"),
            (["--layer", "2"], "there is no layer 2; there are 0, 1, 5"),
            (["--layer", "1", "--head", "12"], "there is no head 12; layer 1 has the heads 0 to 11"),
            (["--layer", "1", "--head", "-1"], "there is no head -1"),
            (["--head", "2"], "--head 2 needs --layer"),
            (["--model", "nowhere"], "nowhere holds no model: there is no config.json"),
        ],
    )
    def test_what_cannot_be_shown_is_a_config_error(self, arguments, message):
        result = command(*arguments)
        assert isinstance(result.exception, attnspec.ConfigError)
        assert message in str(result.exception)

    def test_a_fault_in_a_step_is_reported(self):
        """The width of the model instead of a head's is a classic slip of the scale."""
        with attnspec.substitute(scale=lambda scores, /, **_: scores / 384**0.5):
            result = command()
        assert result.exit_code == 1
        assert "NOT ROUNDING in layer 0, 1, 5" in result.output

    def test_it_needs_neither_pytorch_nor_transformers(self):
        code = "import sys; from attnspec.heads.command import heads; heads(); print(*sys.modules)"
        loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
        assert not {"torch", "transformers"} & set(loaded)


def test_the_default_text_is_the_one_that_is_shipped():
    assert shipped(TEXT).text == TEXT
