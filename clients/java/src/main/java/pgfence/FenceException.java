package pgfence;

import org.postgresql.util.*;

import java.io.*;
import java.security.GeneralSecurityException;
import java.sql.*;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.TimeoutException;
import java.util.function.UnaryOperator;
import java.util.regex.*;
import java.util.stream.Stream;

/**
 * Everything that pg_fence and its client refuse or tell; the driver's error, if there is one, is
 * the cause. By itself: the fence is closed, or a thread cannot be started.
 */
@SuppressWarnings("serial")
public sealed class FenceException extends RuntimeException {
    private final boolean inDoubt;

    FenceException(String message, boolean inDoubt, Throwable cause) {
        super(message, cause);
        this.inDoubt = inDoubt;
    }

    /**
     * Whether a commit failed, or the work has committed, so that it may have landed; or an acquire
     * had no answer.
     */
    public boolean inDoubt() {
        return inDoubt;
    }

    /** Somebody else has the lease. */
    public static final class LeaseTaken extends FenceException {
        private final String holder, waitsFor;
        private final Duration remaining;

        LeaseTaken(
                List<String> names,
                String holder,
                long remaining,
                String waitsFor,
                Throwable cause) {
            super(
                    "the lease %s is taken%s%s"
                            .formatted(
                                    String.join(", ", names),
                                    holder == null ? "" : " by " + holder,
                                    until(remaining, waitsFor)),
                    false,
                    cause);
            this.holder = holder;
            this.waitsFor = waitsFor;
            this.remaining = remaining > 0 ? Duration.ofMillis(remaining) : null;
        }

        private static String until(long remaining, String waitsFor) {
            if ("commit".equals(waitsFor)) {
                return ", whose acquire is not committed yet";
            }
            if ("guard".equals(waitsFor)) {
                return ", until a transaction ends that guards it: its ttl is over";
            }
            String span = ", for %.0f s at the most unless it is renewed";
            return remaining > 0 ? span.formatted(Math.ceil(remaining / 1000.0)) : "";
        }

        /** The holder; null if that cannot be seen. */
        public String holder() {
            return holder;
        }

        /**
         * For how long at the most, unless it is renewed; null if that cannot be seen, or if
         * nothing remains.
         */
        public Duration remaining() {
            return remaining;
        }

        /**
         * What ends it: its "ttl", the "commit" of its acquire, a "guard"; null if that cannot be
         * seen.
         */
        public String waitsFor() {
            return waitsFor;
        }
    }

    /**
     * The lease is ours no more: stop, and report no failure of the work. Somebody else may have it
     * by now.
     */
    public static final class LeaseLost extends FenceException {
        private final Reason reason;
        private final List<String> names;

        LeaseLost(
                Reason reason,
                String advice,
                List<String> names,
                boolean inDoubt,
                Throwable cause) {
            super(
                    "the lease %s is lost (%s)".formatted(String.join(", ", names), reason)
                            + (advice == null ? "" : ": it is another role's; " + ANOTHER_ROLE),
                    inDoubt,
                    cause);
            this.reason = reason;
            this.names = names;
        }

        public Reason reason() {
            return reason;
        }

        public List<String> names() {
            return names;
        }
    }

    /** There was no connection to the server, so that nothing was sent. */
    public static final class NoConnection extends FenceException {
        NoConnection(String message, Throwable cause) {
            super(message, false, cause);
        }
    }

    /**
     * The server has not answered in time. Where it is in doubt a grant may be there, and is given
     * back if that can be.
     */
    public static final class NoAnswer extends FenceException {
        NoAnswer(String message, boolean inDoubt, Throwable cause) {
            super(message, inDoubt, cause);
        }
    }

    /**
     * Why a lease is ours no more: it could not be renewed in time; the server says so; the server
     * will never renew it; the connection of a session lease has ended; it was to be held no
     * longer; what kept it has died; its holder gave it back. That is unconfirmed, as an event, if
     * the server has not answered.
     */
    public enum Reason {
        DEADLINE,
        GONE,
        REFUSED,
        SESSION,
        AT_MOST,
        HEARTBEAT,
        RELEASED,
        UNCONFIRMED;

        @Override
        public String toString() {
            return name().toLowerCase(Locale.ROOT);
        }
    }

    /** The server refused a write, a guard or a call. */
    public static final class Refused extends FenceException {
        private final ServerErrorMessage said;

        private Refused(ServerErrorMessage said, Throwable cause) {
            super(
                    said.getMessage() + (said.getHint() == null ? "" : " (" + said.getHint() + ")"),
                    false,
                    cause);
            this.said = said;
        }

        /**
         * PF001: a newer token was seen. PF002: no token. PF004: the token does not speak for the
         * lease…
         */
        public String sqlState() {
            return said.getSQLState();
        }

        /**
         * The server's DETAIL, a JSON object: {@code presented}, {@code stored}, {@code lease},
         * {@code holder}…
         */
        public String detail() {
            return said.getDetail();
        }

        /** The server's HINT: the remedy; null where there is none. */
        public String hint() {
            return said.getHint();
        }

        String holder() {
            Matcher found = HOLDER.matcher(String.valueOf(detail()));
            return found.find() ? found.group(1).replaceAll("\\\\([\"\\\\])", "$1") : null;
        }

        private static final Pattern HOLDER =
                Pattern.compile("\"holder\": ?\"((?:[^\"\\\\]|\\\\.)*)\"");
    }

    /**
     * The session ended under the transaction, or the work swallowed the error that undid it, or
     * ended it by itself. Nothing of it has landed, unless {@link #inDoubt}. The lease may be held
     * still.
     */
    public static final class TransactionLost extends FenceException {
        TransactionLost(String message, boolean inDoubt, Throwable cause) {
            super(message, inDoubt, cause);
        }
    }

    /**
     * The extension is not in this database, or in a schema that is not on the {@code search_path}.
     */
    public static final class NotInstalled extends FenceException {
        private NotInstalled(Throwable cause) {
            super(NOT_INSTALLED + " (" + cause.getMessage() + ")", false, cause);
        }

        private static final String NOT_INSTALLED =
                "pg_fence is not installed in this database, or not on the search_path: CREATE"
                        + " EXTENSION pg_fence, or name the schema that it is in,"
                        + " new Fence(…).schema(…)";
    }

    /** The role may not use this lease. */
    public static final class NotGranted extends FenceException {
        private NotGranted(String role, Statements.Table table, Throwable cause) {
            super(message(role, table, cause), false, cause);
        }

        private static String message(String role, Statements.Table table, Throwable cause) {
            String who = "the role " + role + " may not ", said = ": " + cause.getMessage() + "; ";
            if (table != null) {
                return who + "keep rows of " + table.name() + said + "it needs SELECT and UPDATE";
            }
            String level = said.contains("lease_adopt") ? "', 'adopter')" : "')";
            String grant = "an administrator grants it: SELECT fence_grant('" + role + level;
            boolean isOthers = said.contains("was granted to another role");
            return who + "use the lease" + said + (isOthers ? ANOTHER_ROLE : grant);
        }
    }

    private static final String ANOTHER_ROLE =
            "a lease is used by the role that acquired it, and by its members: where login roles"
                    + " change, let all of them act as one role (options=-c role=…, or SET ROLE)";

    // How they are found in what a driver, or what stands on it, has thrown

    private static Stream<Throwable> causes(Throwable error) {
        return Stream.iterate(error, Objects::nonNull, Throwable::getCause).limit(50);
    }

    /**
     * The driver's, however deep they are wrapped. A batch has the server's error behind its own.
     */
    private static Stream<SQLException> chain(Throwable error) {
        UnaryOperator<SQLException> next = SQLException::getNextException;
        return causes(error)
                .filter(SQLException.class::isInstance)
                .flatMap(one -> Stream.iterate((SQLException) one, Objects::nonNull, next));
    }

    /** The SQLSTATE, or an empty text. */
    static String stateOf(Throwable error) {
        Stream<String> states = chain(error).map(SQLException::getSQLState);
        return states.filter(Objects::nonNull).findFirst().orElse("");
    }

    /**
     * Whether a session has ended, or there was none: class 08, idle in transaction, too long,
     * terminated, crashed, …
     */
    static boolean isEnd(Throwable error) {
        return stateOf(error).matches("08...|25P0[34]|57P0[1235]|53300");
    }

    private static boolean isBy(Throwable error, Class<?>... types) {
        return causes(error)
                .anyMatch(one -> Stream.of(types).anyMatch(type -> type.isInstance(one)));
    }

    /**
     * Whether the driver will not open the connection, however often it tries: the server has no
     * TLS or asks for a password that is not there (08004), its certificate is refused, or the file
     * of one is missing.
     */
    private static boolean neverOpens(Throwable error) {
        return chain(error).anyMatch(FenceException::isFinal);
    }

    private static boolean isFinal(SQLException error) {
        String state = String.valueOf(error.getSQLState());
        return state.equals("08004")
                || state.equals("08006") && error.getCause() == null
                || state.equals("08006")
                        && isBy(error, GeneralSecurityException.class, FileNotFoundException.class)
                || String.valueOf(error.getMessage()).startsWith("No suitable driver");
    }

    /**
     * The SQLSTATE of what has failed to open a connection; "connect", if another try may open it;
     * else "misconfigured".
     */
    static String codeOfOpening(Throwable error) {
        boolean mayPass =
                isBy(error, SQLException.class, IOException.class, TimeoutException.class);
        if (error != null && !mayPass || neverOpens(error)) {
            return "misconfigured";
        }
        String state = stateOf(error);
        return state.isEmpty() ? "connect" : state;
    }

    /** What a leader may go on after, by the specification's words. */
    static String causeOf(Throwable error) {
        String state = stateOf(error);
        boolean isOpening = error instanceof NoConnection;
        if (error instanceof NotInstalled
                || error instanceof NotGranted
                || isOpening && codeOfOpening(error.getCause()).equals("misconfigured")) {
            return "own";
        }
        // The next renewal tells.
        if (state.matches("PF00[14]")) {
            return "LeaseLost";
        }
        if (error instanceof FenceException
                && !(error instanceof Refused || isOpening && !state.isEmpty())) {
            return error.getClass().getSimpleName();
        }
        return isEnd(error) && !neverOpens(error)
                ? "ConnectionLost"
                : LeaseState.passes(state) ? "transient" : "own";
    }

    /** The meaning of an error of the work's own: a refusal of the fence, or itself. */
    static Throwable ofWork(Throwable error) {
        return stateOf(error).startsWith("PF") ? refused(error) : error;
    }

    /**
     * The meaning of an error of one of our own statements, on a connection of that role, about
     * rows of that table or about names.
     */
    static Throwable ofCall(Throwable error, String role, Statements.Table table) {
        String state = stateOf(error);
        // The schema that a row's statement misses is the table's.
        if (state.equals("42883") || state.equals("3F000") && table == null) {
            return new NotInstalled(error);
        }
        if (state.equals("42501")) {
            return new NotGranted(role, table, error);
        }
        return state.matches("(PF|22|55|0A|53).*") && !state.equals("55P03")
                ? refused(error)
                : error;
    }

    /** Where it is not the driver's own. */
    private static Throwable refused(Throwable error) {
        return chain(error)
                .map(one -> one instanceof PSQLException told ? told.getServerErrorMessage() : null)
                .filter(Objects::nonNull)
                .<Throwable>map(said -> new Refused(said, error))
                .findFirst()
                .orElse(error);
    }
}
