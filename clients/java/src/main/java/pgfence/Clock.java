package pgfence;

import java.io.FileInputStream;
import java.io.IOException;

/** A clock that nobody can set, and that goes on while the machine sleeps if the system tells. */
final class Clock {
    private static final double AHEAD = System.nanoTime() / 1e9 - uptime();

    /** The uptime is told in hundredths of a second, and may not run ahead. */
    private static final double COARSE = 0.02;

    private Clock() {}

    /** In whole milliseconds. */
    static long now() {
        // The clock of nanoTime stands still while the machine sleeps, and Java has no other that
        // is monotonic.
        return (long) (Math.max(System.nanoTime() / 1e9, uptime() + AHEAD - COARSE) * 1000);
    }

    private static double uptime() {
        try (FileInputStream file = new FileInputStream("/proc/uptime")) {
            return Double.parseDouble(new String(file.readNBytes(100)).split(" ")[0]);
        } catch (IOException | RuntimeException elsewhere) {
            return 0;
        }
    }
}
