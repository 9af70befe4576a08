package pgfence;

import java.io.IOException;
import java.nio.file.*;
import java.time.Duration;
import java.util.*;
import java.util.function.Consumer;

/**
 * How a lease is asked for: by default for 30 s at a time, exclusive, without a wait. Each method
 * returns another one.
 */
public final class Options implements Cloneable {
    // In milliseconds.
    long ttl = 30_000, wait, atMost = LeaseState.NEVER;
    String holder, metadata, fence = "fence", deadline = "held_until";

    /** Nobody else has that holder's name. */
    boolean isOwnHolder;

    boolean reclaim, session, shared;
    int slots = 1;

    /** For how long it is held at a time: a heartbeat renews it. At least 100 ms. */
    public Options ttl(Duration ttl) {
        if (millis(ttl) < 100) {
            throw new IllegalArgumentException(
                    "a ttl of " + millis(ttl) + " ms: it takes at least 100 ms");
        }
        return with(options -> options.ttl = millis(ttl));
    }

    /** For how long to wait if it is taken; an outage is waited for as well. */
    public Options waitUpTo(Duration wait) {
        if (wait.isNegative()) {
            throw new IllegalArgumentException("a wait is not negative: " + wait);
        }
        return with(options -> options.wait = millis(wait));
    }

    /**
     * So long after it was acquired the lease is lost, whatever its heartbeat does: for work that
     * hangs.
     */
    public Options atMost(Duration atMost) {
        if (millis(atMost) < 1) {
            throw new IllegalArgumentException("at most " + atMost + ": it takes a millisecond");
        }
        return with(options -> options.atMost = millis(atMost));
    }

    /** The holder's name, for others to see. Otherwise a text that is unique for the call. */
    public Options holder(String holder) {
        return with(options -> options.holder = holder);
    }

    /** Takes the lease over if this {@link #holder} has it already. */
    public Options reclaim() {
        return with(options -> options.reclaim = true);
    }

    /**
     * It ends with the process, too, or with the connection that it has for itself. Not through a
     * pooler.
     */
    public Options session() {
        return with(options -> options.session = true);
    }

    /** Any number of these live together, none beside an exclusive one. */
    public Options shared() {
        return with(options -> options.shared = true);
    }

    /** Up to so many live together. */
    public Options slots(int slots) {
        return with(options -> options.slots = slots);
    }

    /** For others to see: a text that is JSON. */
    public Options metadata(String json) {
        return with(options -> options.metadata = json);
    }

    /**
     * Of {@link Fence#keepRow}: the columns of the token and of the deadline, where those are not
     * called fence and held_until.
     */
    public Options columns(String fence, String deadline) {
        return with(
                options -> {
                    options.fence = Objects.requireNonNull(fence);
                    options.deadline = Objects.requireNonNull(deadline);
                });
    }

    /** What is longer than any time that is counted is for ever. */
    private static long millis(Duration span) {
        boolean isEver = span.getSeconds() >= LeaseState.NEVER / 1000;
        return isEver ? LeaseState.NEVER : span.toMillis();
    }

    boolean isShared() {
        return shared || slots > 1;
    }

    /** With a holder, which is unique if none is given. */
    Options named() {
        if (holder != null || reclaim) {
            return this;
        }
        return with(
                options -> {
                    options.holder = unique();
                    options.isOwnHolder = true;
                });
    }

    /** The holder that adopts if none is named: all fences of this process are one holder. */
    static final String PROCESS = unique();

    /** The host is as the system has it: to ask a resolver may take long. */
    private static String unique() {
        String host = System.getenv().getOrDefault("COMPUTERNAME", "java");
        try {
            host = Files.readString(Path.of("/proc/sys/kernel/hostname")).strip();
        } catch (IOException elsewhere) {
            // Then it is another system.
        }
        return host
                + '/'
                + ProcessHandle.current().pid()
                + '/'
                + UUID.randomUUID().toString().substring(0, 8);
    }

    private Options with(Consumer<Options> change) {
        try {
            Options other = (Options) clone();
            change.accept(other);
            return other;
        } catch (CloneNotSupportedException never) {
            throw new IllegalStateException(never);
        }
    }
}
