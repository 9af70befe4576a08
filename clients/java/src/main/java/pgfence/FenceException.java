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
 * The errors of pg_fence and its client. The cause is the driver's error, if there is one. An error
 * of this class itself says that the fence is closed, or that a thread cannot be started.
 */
@SuppressWarnings("serial")
public sealed class FenceException extends RuntimeException {
    private final boolean inDoubt;

    FenceException(String message, boolean inDoubt, Throwable cause) {
        super(message, cause);
        this.inDoubt = inDoubt;
    }

    /**
     * Returns true if the transaction may have been committed, as its commit failed or the work has
     * ended it; or if an acquire without an answer may have been granted.
     */
    public boolean inDoubt() {
        return inDoubt;
    }

    /** Another holder has the lease. */
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

        /** Returns the holder of the lease; null if it is not visible. */
        public String holder() {
            return holder;
        }

        /**
         * Returns how long the lease remains taken unless it is renewed; null if that is not
         * visible, or if nothing remains.
         */
        public Duration remaining() {
            return remaining;
        }

        /**
         * Returns what an acquire has to wait for: "ttl", the lease's end; "commit", the commit of
         * the holder's acquire; "guard", the end of a transaction that guards the lease. It is null
         * if that is not visible.
         */
        public String waitsFor() {
            return waitsFor;
        }
    }

    /**
     * The lease is lost, and another holder may have it: stop the work, and do not report it as
     * failed.
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

        /** Returns why the lease is lost. */
        public Reason reason() {
            return reason;
        }

        /** Returns the names of the lease; for a row lease its table and its key. */
        public List<String> names() {
            return names;
        }
    }

    /** There was no connection to the server, and nothing was sent. */
    public static final class NoConnection extends FenceException {
        NoConnection(String message, Throwable cause) {
            super(message, false, cause);
        }
    }

    /**
     * The server has not answered in time. If {@link #inDoubt} is true, it may have granted the
     * lease, which is then released if its holder is unique.
     */
    public static final class NoAnswer extends FenceException {
        NoAnswer(String message, boolean inDoubt, Throwable cause) {
            super(message, inDoubt, cause);
        }
    }

    /** Why a lease is lost. */
    public enum Reason {
        /** The lease could not be renewed in time. */
        DEADLINE,
        /** The server says so: the lease was taken over or revoked, or has expired. */
        GONE,
        /** The server refuses to renew the lease. */
        REFUSED,
        /** The connection of a session lease has ended. */
        SESSION,
        /** The time of {@link Options#atMost} is over. */
        AT_MOST,
        /** The heartbeat has failed. */
        HEARTBEAT,
        /** The holder has released the lease. */
        RELEASED,
        /** Only in an event: the lease was released, and the server has not answered. */
        UNCONFIRMED;

        @Override
        public String toString() {
            return name().toLowerCase(Locale.ROOT);
        }
    }

    /** The server refused a write, a guard or a call. */
    public static final class Refused extends FenceException {
        private final ServerErrorMessage serverError;

        private Refused(ServerErrorMessage serverError, Throwable cause) {
            super(message(serverError), false, cause);
            this.serverError = serverError;
        }

        private static String message(ServerErrorMessage error) {
            String hint = error.getHint();
            return error.getMessage() + (hint == null ? "" : " (" + hint + ")");
        }

        /**
         * Returns the SQLSTATE. PF001: a newer token was seen. PF002: there is no token. PF004: the
         * token is not valid for the lease. The page docs/reference/errors.md has all.
         */
        public String sqlState() {
            return serverError.getSQLState();
        }

        /**
         * Returns the server's DETAIL, a JSON object with fields as {@code presented}, {@code
         * stored}, {@code lease} and {@code holder}.
         */
        public String detail() {
            return serverError.getDetail();
        }

        /** Returns the server's HINT, which says what to do; null if there is none. */
        public String hint() {
            return serverError.getHint();
        }
    }

    /**
     * The transaction was not committed: its session has ended, or the work has swallowed an error
     * of the server, or has ended the transaction itself. If {@link #inDoubt} is true, it may have
     * been committed. The lease may still be held.
     */
    public static final class TransactionLost extends FenceException {
        TransactionLost(String message, boolean inDoubt, Throwable cause) {
            super(message, inDoubt, cause);
        }
    }

    /**
     * The extension is not installed in this database, or its schema is not on the {@code
     * search_path}.
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
            String who = "the role " + role + " may not ", why = ": " + cause.getMessage() + "; ";
            if (table != null) {
                return who + "keep rows of " + table.name() + why + "it needs SELECT and UPDATE";
            }
            String level = why.contains("lease_adopt") ? "', 'adopter')" : "')";
            // The server reads the text as an identifier.
            boolean isPlain = role.matches("[a-z0-9_…]*");
            String granted = (isPlain ? role : Statements.quoted(role)).replace("'", "''") + level;
            String grant = "an administrator grants it: SELECT fence_grant('" + granted;
            boolean isOtherRole = why.contains("was granted to another role");
            return who + "use the lease" + why + (isOtherRole ? ANOTHER_ROLE : grant);
        }
    }

    private static final String ANOTHER_ROLE =
            "a lease is used by the role that acquired it, and by its members: where login roles"
                    + " change, let all of them act as one role (options=-c role=…, or SET ROLE)";

    // Finding the driver's error in an exception that may wrap it.

    private static Stream<Throwable> chain(Throwable error) {
        return Stream.iterate(error, Objects::nonNull, Throwable::getCause).limit(50);
    }

    /**
     * Returns the exception and its causes. An exception that the program has made from one of
     * these is the program's own.
     */
    private static Stream<Throwable> causes(Throwable error) {
        return chain(error)
                .takeWhile(cause -> cause == error || !(cause instanceof FenceException));
    }

    /**
     * Returns the driver's errors, however deep they are wrapped. The server's error in a batch is
     * the next exception of the batch's own.
     */
    private static Stream<SQLException> sqlExceptions(Throwable error) {
        UnaryOperator<SQLException> next = SQLException::getNextException;
        return causes(error)
                .filter(SQLException.class::isInstance)
                .flatMap(cause -> Stream.iterate((SQLException) cause, Objects::nonNull, next));
    }

    /**
     * Returns the type of this package's exception, which may be a cause, as of an
     * ExecutionException; or an empty text.
     */
    static String typeOf(Throwable error) {
        return chain(error)
                .filter(FenceException.class::isInstance)
                .findFirst()
                .map(found -> found.getClass().getSimpleName())
                .orElse("");
    }

    /** Returns the SQLSTATE, or an empty text if there is none. */
    static String stateOf(Throwable error) {
        Stream<String> states = sqlExceptions(error).map(SQLException::getSQLState);
        return states.filter(Objects::nonNull).findFirst().orElse("");
    }

    /** Returns true if the severity of the server's error is FATAL or PANIC. */
    static boolean isFatal(Throwable error) {
        return causes(error)
                .filter(PSQLException.class::isInstance)
                .map(cause -> ((PSQLException) cause).getServerErrorMessage())
                .anyMatch(it -> it != null && List.of("FATAL", "PANIC").contains(it.getSeverity()));
    }

    private static boolean isCausedBy(Throwable error, Class<?>... types) {
        return causes(error)
                .anyMatch(cause -> Stream.of(types).anyMatch(type -> type.isInstance(cause)));
    }

    /**
     * Returns true if another attempt cannot open the connection either: the server has no TLS or
     * needs a password that is missing (08004), its certificate is refused, or a certificate's file
     * is missing.
     */
    private static boolean isFinal(SQLException error) {
        String state = String.valueOf(error.getSQLState());
        boolean isOfTls =
                error.getCause() == null
                        || isCausedBy(
                                error, GeneralSecurityException.class, FileNotFoundException.class);
        return state.equals("08004")
                || state.equals("08006") && isOfTls
                || String.valueOf(error.getMessage()).startsWith("No suitable driver");
    }

    /** Returns the code of an opening that has failed: "connect" if there is no other. */
    static String codeOfOpening(Throwable error) {
        boolean mayPass =
                isCausedBy(error, SQLException.class, IOException.class, TimeoutException.class);
        String code = error == null || mayPass ? codeOf(error) : "misconfigured";
        return code.isEmpty() ? "connect" : code;
    }

    /**
     * Returns the SQLSTATE of an error, or an empty text, but "misconfigured" if it says that no
     * attempt can open a connection, which may be one of the work's own.
     */
    static String codeOf(Throwable error) {
        if (error instanceof NoConnection) {
            return codeOfOpening(error.getCause());
        }
        boolean neverOpens = sqlExceptions(error).anyMatch(FenceException::isFinal);
        return neverOpens ? "misconfigured" : stateOf(error);
    }

    /**
     * Returns the error as the {@code type} of those that the server causes, or the error itself if
     * that is empty. The statement was executed by {@code role}, and was about rows of {@code
     * table}, or about names if that is null.
     */
    static Throwable typed(Throwable error, String type, String role, Statements.Table table) {
        return switch (type) {
            case "NotInstalled" -> new NotInstalled(error);
            case "NotGranted" -> new NotGranted(role, table, error);
            case "Refused" -> refused(error);
            default -> error;
        };
    }

    /** Returns the holder in the DETAIL of the server's error; null if there is none. */
    static String holderOf(Throwable error) {
        String detail = refused(error) instanceof Refused refused ? refused.detail() : null;
        Matcher found = HOLDER.matcher(String.valueOf(detail));
        return found.find() ? found.group(1).replaceAll("\\\\([\"\\\\])", "$1") : null;
    }

    private static final Pattern HOLDER =
            Pattern.compile("\"holder\": ?\"((?:[^\"\\\\]|\\\\.)*)\"");

    /** Returns Refused if the error comes from the server, or the error itself. */
    private static Throwable refused(Throwable error) {
        return sqlExceptions(error)
                .map(one -> one instanceof PSQLException sql ? sql.getServerErrorMessage() : null)
                .filter(Objects::nonNull)
                .<Throwable>map(serverError -> new Refused(serverError, error))
                .findFirst()
                .orElse(error);
    }
}
