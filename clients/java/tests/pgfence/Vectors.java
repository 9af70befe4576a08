package pgfence;

import com.google.gson.*;

import org.junit.jupiter.api.Test;

import pgfence.LeaseState.*;

import java.io.IOException;
import java.lang.reflect.Field;
import java.nio.file.*;
import java.util.*;
import java.util.function.*;
import java.util.stream.*;

/** Plays clients/spec/vectors, whose format is in clients/spec/README.md. */
final class Vectors {
    private static final JsonElement NOTHING = JsonNull.INSTANCE;

    private LeaseState states;
    private Leader leader;
    private long spread, calls;

    @Test
    void theyHold() throws IOException {
        play(Path.of(System.getenv().getOrDefault("VECTORS", "../spec/vectors")));
    }

    static int play(Path directory) throws IOException {
        int count = 0;
        List<String> wrong = new ArrayList<>();
        try (DirectoryStream<Path> files = Files.newDirectoryStream(directory, "*.json")) {
            for (Path file : files) {
                for (JsonElement vector :
                        JsonParser.parseString(Files.readString(file)).getAsJsonArray()) {
                    JsonObject of = vector.getAsJsonObject();
                    try {
                        new Vectors().play(of);
                    } catch (RuntimeException | AssertionError error) {
                        wrong.add(file.getFileName() + ": " + of.get("name") + ": " + error);
                    }
                    count++;
                }
            }
        }
        check(wrong.isEmpty(), () -> String.join("\n", wrong));
        check(count > 0, () -> "there are no vectors in " + directory);
        return count;
    }

    private void play(JsonObject vector) {
        spread = number(vector, "spread", 0);
        states = new LeaseState(spread);
        for (JsonElement one : vector.getAsJsonArray("steps")) {
            JsonObject step = one.getAsJsonObject();
            long at = number(step, "at", 0);
            Map.Entry<String, JsonElement> in =
                    step.getAsJsonObject("in").entrySet().iterator().next();
            List<Effect> effects = input(at, in.getKey(), in.getValue().getAsJsonObject());
            JsonArray out = step.has("out") ? step.getAsJsonArray("out") : new JsonArray();
            List<JsonObject> are = effects.stream().map(Vectors::fields).toList();
            calls += are.stream().filter(effect -> effect.has("call")).count();
            boolean isLike =
                    are.size() == out.size()
                            && IntStream.range(0, are.size())
                                    .allMatch(
                                            i -> isLike(are.get(i), out.get(i).getAsJsonObject()));
            check(isLike, () -> "at " + at + " " + are + " instead of " + out);
            each(step, "held", key -> new JsonPrimitive(states.remaining(at, key) > 0));
            each(step, "deadline", key -> new JsonPrimitive(states.grant(key).deadline));
            each(step, "next_beat", key -> new JsonPrimitive(states.grant(key).at));
            long wake = Math.min(states.wake(at), 1L << 53), should = number(step, "wake", wake);
            check(wake == should, () -> "at " + at + " wake is " + wake + ", not " + should);
        }
    }

    private List<Effect> input(long at, String what, JsonObject with) {
        if (what.equals("nothing")) {
            return List.of();
        }
        if (what.equals("lead")) {
            return leads(at, with);
        }
        int call = (int) number(with, "call", 0);
        check(call <= calls, () -> "at " + at + " call " + call + " was never sent");
        return states.step(
                at,
                what.matches("answer|failed|sent") ? call : 0,
                () -> {
                    String key = text(with, "key"), id = text(with, "id");
                    switch (what) {
                        case "acquire" -> states.acquire(id, strings(with, "names"), asked(with));
                        case "keep_row" ->
                                states.keepRow(
                                        id,
                                        key,
                                        asked(with),
                                        text(with, "table"),
                                        number(with, "token", 0));
                        case "give_up" -> states.giveUp(id);
                        case "release" -> states.release(key);
                        case "check" -> states.check(key);
                        case "last" -> states.last(strings(with, "keys"), text(with, "stage"));
                        case "touches" -> states.touches(key);
                        case "ended" -> states.ended(key);
                        case "suspect" -> states.suspect(strings(with, "keys"));
                        case "close" -> states.close();
                        case "died" -> states.died();
                        case "sent" -> states.sent(call);
                        case "answer" -> states.answered(call, answer(with));
                        case "failed" ->
                                states.failed(call, text(with, "code"), is(with, "broken"));
                        case "disconnected" -> states.disconnected((int) number(with, "on", 0));
                        case "tick" -> {}
                        default -> throw new AssertionError("there is no input " + what);
                    }
                });
    }

    private static Options asked(JsonObject with) {
        Options asked = new Options();
        asked.ttl = number(with, "ttl", 0);
        asked.wait = number(with, "wait", 0);
        asked.holder = text(with, "holder");
        asked.isOwnHolder = !with.has("table") && !is(with, "named");
        asked.reclaim = is(with, "reclaim");
        asked.session = is(with, "session");
        asked.shared = is(with, "shared");
        asked.atMost = number(with, "at_most", LeaseState.NEVER);
        return asked;
    }

    /** The rows are those of some statement: each is read as all that it can be. */
    private static Answer answer(JsonObject with) {
        Long number = null;
        Taken taken = null;
        List<Outcome> outcomes = new ArrayList<>();
        if (with.has("taken")) {
            JsonObject by = with.getAsJsonObject("taken");
            taken = new Taken(text(by, "holder"), number(by, "remaining", 0), text(by, "state"));
        }
        for (JsonElement row :
                all(with.has("rows") ? with.getAsJsonArray("rows") : new JsonArray())) {
            if (!row.isJsonArray()) {
                number = row.isJsonNull() ? null : (Long) row.getAsLong();
                outcomes.add(new Outcome(number != null));
                continue;
            }
            List<JsonElement> columns = new ArrayList<>(row.getAsJsonArray().asList());
            columns.addAll(Collections.nCopies(3, NOTHING));
            if (columns.get(0).isJsonArray()) {
                number = columns.get(1).getAsLong();
                continue;
            }
            String code = columns.get(3).isJsonNull() ? null : columns.get(3).getAsString();
            long remaining = span(columns.get(1)), again = span(columns.get(2));
            outcomes.add(new Outcome(columns.get(0).getAsString(), remaining, again, code));
        }
        return new Answer(number, taken, outcomes);
    }

    private List<Effect> leads(long at, JsonObject with) {
        String cause = text(with, "cause");
        switch (text(with, "what")) {
            case "start" -> {
                leader = new Leader(number(with, "ttl", 0), spread);
                return leader.start();
            }
            case "granted" -> {
                return leader.granted(at);
            }
            case "work done" -> {
                return leader.workDone();
            }
            case "work failed" -> {
                return leader.workFailed(at, cause, is(with, "lost"));
            }
            case "not granted" -> {
                return leader.notGranted(at, cause);
            }
            case "stop" -> {
                return leader.stop();
            }
            case "tick" -> {
                return leader.tick(at);
            }
            default -> throw new AssertionError("there is no such step of a leader: " + with);
        }
    }

    // What is, and what should be

    private static JsonObject fields(Effect effect) {
        JsonObject fields = new JsonObject();
        Map<String, String> words =
                Map.of(
                        "verb",
                        "do",
                        "asker",
                        "for",
                        "inDoubt",
                        "in_doubt",
                        "waitsFor",
                        "waits_for",
                        "hangUp",
                        "hang_up");
        for (Field field : effect.getClass().getDeclaredFields()) {
            field.setAccessible(true);
            try {
                Object value = field.get(effect);
                JsonElement is =
                        value instanceof Number number
                                ? new JsonPrimitive(number)
                                : value instanceof Boolean truth
                                        ? new JsonPrimitive(truth)
                                        : value instanceof List<?> some
                                                ? new Gson()
                                                        .toJsonTree(
                                                                some.stream()
                                                                        .map(Vectors::plain)
                                                                        .toList())
                                                : value == null
                                                        ? NOTHING
                                                        : new JsonPrimitive(value.toString());
                fields.add(words.getOrDefault(field.getName(), field.getName()), is);
            } catch (IllegalAccessException never) {
                throw new AssertionError(never);
            }
        }
        return fields;
    }

    private static Object plain(Object value) {
        return value instanceof Number ? value : value.toString();
    }

    /** All that is expected is there, in full; what is missing counts as 0, false or empty. */
    private static boolean isLike(JsonObject is, JsonObject expected) {
        return expected.entrySet().stream()
                .allMatch(
                        field -> {
                            JsonElement
                                    value =
                                            is.has(field.getKey())
                                                    ? is.get(field.getKey())
                                                    : NOTHING,
                                    should = field.getValue();
                            if (should.isJsonObject()) {
                                return value.isJsonArray()
                                        && value.getAsJsonArray().size()
                                                == number(should.getAsJsonObject(), "length", -1);
                            }
                            if (should.isJsonArray()) {
                                return all(should.getAsJsonArray())
                                        .equals(
                                                value.isJsonNull()
                                                        ? List.of()
                                                        : value.getAsJsonArray().asList());
                            }
                            boolean isMissing =
                                    value.isJsonNull() && should.getAsString().matches("0|false|");
                            return isMissing || value.equals(should);
                        });
    }

    /** With the shorthands written out. */
    private static List<JsonElement> all(JsonArray some) {
        return some.asList().stream()
                .flatMap(
                        one -> {
                            JsonObject of =
                                    one.isJsonObject() ? one.getAsJsonObject() : new JsonObject();
                            return !of.has("count")
                                    ? Stream.of(one)
                                    : IntStream.range(0, of.get("count").getAsInt())
                                            .mapToObj(
                                                    i ->
                                                            of.has("each")
                                                                    ? of.get("each")
                                                                    : new JsonPrimitive(
                                                                            text(of, "prefix")
                                                                                    + i));
                        })
                .toList();
    }

    private static void each(JsonObject step, String what, Function<String, JsonElement> of) {
        if (!step.has(what)) {
            return;
        }
        for (Map.Entry<String, JsonElement> one : step.getAsJsonObject(what).entrySet()) {
            JsonElement is = of.apply(one.getKey());
            String where = "at " + step.get("at") + " " + what + " of " + one.getKey();
            check(is.equals(one.getValue()), () -> where + " is " + is + ", not " + one.getValue());
        }
    }

    private static void check(boolean holds, Supplier<String> otherwise) {
        if (!holds) {
            throw new AssertionError(otherwise.get());
        }
    }

    private static long number(JsonObject of, String key, long otherwise) {
        return of.has(key) ? of.get(key).getAsLong() : otherwise;
    }

    private static long span(JsonElement value) {
        return value.isJsonNull() ? -1 : value.getAsLong();
    }

    private static String text(JsonObject of, String key) {
        return of.has(key) ? of.get(key).getAsString() : null;
    }

    private static boolean is(JsonObject of, String key) {
        return of.has(key) && of.get(key).getAsBoolean();
    }

    private static List<String> strings(JsonObject of, String key) {
        return all(of.getAsJsonArray(key)).stream().map(JsonElement::getAsString).toList();
    }
}
