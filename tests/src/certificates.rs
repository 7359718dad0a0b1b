//! Certificates made by openssl, in the files that QEMU, libnbd and [`WebServer`](crate::web_server::WebServer) look for.

use crate::program::{required, run_in};
use std::path::Path;

/// Runs openssl(1) in `dir`. `line` is split at blanks.
///
/// # Panics
/// If openssl is missing or fails.
pub fn openssl(dir: &Path, line: &str) {
    run_in(dir, &required("openssl"), line.split_whitespace()).ok();
}

/// Makes an authority, and a server and a client for `localhost`.
///
/// # Panics
/// If openssl is missing or fails.
pub fn certificates(dir: &Path) {
    let authority =
        "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=authority -keyout ca-key.pem -out ca-cert.pem";
    openssl(dir, authority);
    sign(dir, "server", "/CN=localhost", "subjectAltName=DNS:localhost\n");
    client_certificate(dir, "/CN=localhost");
}

/// Makes `client-cert.pem` and `client-key.pem` for a subject, signed by the authority of [`certificates`].
///
/// # Panics
/// If openssl is missing or fails.
pub fn client_certificate(dir: &Path, subject: &str) {
    sign(dir, "client", subject, "extendedKeyUsage=clientAuth\n");
}

fn sign(dir: &Path, name: &str, subject: &str, extensions: &str) {
    std::fs::write(dir.join(format!("{name}.ext")), extensions).expect("a file");
    openssl(
        dir,
        &format!("req -newkey rsa:2048 -nodes -subj {subject} -keyout {name}-key.pem -out {name}.csr"),
    );
    openssl(
        dir,
        &format!(
            "x509 -req -in {name}.csr -CA ca-cert.pem -CAkey ca-key.pem -CAcreateserial -days 2 -extfile {name}.ext \
             -out {name}-cert.pem"
        ),
    );
}
