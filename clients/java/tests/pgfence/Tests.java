package pgfence;

import java.lang.reflect.Method;
import java.lang.reflect.Modifier;
import java.util.List;

/** What the scenarios of all clients do not show. {@code DATABASE_URL} names a database with the extension. */
final class Tests {
    private Tests() {}

    /** All tests, or those whose names are given. */
    public static void main(String[] arguments) throws Exception {
        for (Case tests : List.of(new LeaseTests(), new SlipTests(), new VerbTests())) {
            int threads = Thread.activeCount();
            for (Method method : tests.getClass().getDeclaredMethods()) {
                boolean isAsked = arguments.length == 0 || List.of(arguments).contains(method.getName());
                if (isAsked && Modifier.isPublic(method.getModifiers()) && method.getParameterCount() == 0) {
                    run(tests, method, threads);
                }
            }
        }
    }

    private static void run(Case tests, Method method, int threads) throws Exception {
        tests.setUp();
        try {
            method.invoke(tests);
        } catch (ReflectiveOperationException error) {
            throw new AssertionError(method.getName(), error.getCause());
        }
        Case.equal(tests.value("SELECT count(*) FROM fence.leases WHERE state = 'held'"), "0");
        // A refused acquire is answered before its threads have ended.
        for (int round = 0; round < 1200 && Thread.activeCount() != threads; round++) {
            Thread.sleep(50);
        }
        if (Thread.activeCount() != threads) {
            throw new AssertionError(method.getName() + " leaves " + Thread.getAllStackTraces());
        }
    }
}
