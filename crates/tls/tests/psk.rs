//! Two ends of a connection with a pre-shared key, without a network.

use rustls::pki_types::pem::PemObject as _;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use zebu_tls::Session;
use zebu_tls::psk::{ClientConfig, PskError, ServerConfig};

struct Files {
    _directory: tempfile::TempDir,
    server: PathBuf,
    client: PathBuf,
}

fn files(server: &str, client: &str) -> Files {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let (server, client) = (write("server.psk", server), write("client.psk", client));
    Files { _directory: directory, server, client }
}

fn server(path: &Path) -> Session {
    Session::PreSharedKeys(ServerConfig::from_file(path).unwrap().connection().unwrap())
}

fn client(path: &Path, identity: &str) -> Session {
    Session::PreSharedKeys(ClientConfig::from_file(path, identity).unwrap().connection().unwrap())
}

/// Carries what `from` has to send to `to`, `piece` bytes at a time, and has it look at each; how many bytes went.
fn carry(from: &mut Session, to: &mut Session, piece: usize) -> Result<usize, String> {
    let mut bytes = Vec::new();
    while from.wants_to_send() {
        from.send_to(&mut bytes).unwrap();
    }
    for piece in bytes.chunks(piece) {
        let mut piece = piece;
        while !piece.is_empty() {
            to.receive_from(&mut piece).unwrap();
            to.process().map_err(|error| error.to_string())?;
        }
    }
    Ok(bytes.len())
}

/// Goes on until both are through, or one fails.
fn shake_hands(client: &mut Session, server: &mut Session, piece: usize) -> Result<(), String> {
    for _ in 0..10 {
        carry(client, server, piece)?;
        let answered = carry(server, client, piece);
        answered?;
        if !client.is_handshaking() && !server.is_handshaking() {
            return Ok(());
        }
    }
    Err("no end of the handshake".to_owned())
}

fn read_all(from: &mut Session) -> Vec<u8> {
    let mut all = Vec::new();
    let mut buf = [0; 1000];
    loop {
        match from.read(&mut buf) {
            Ok(count) => all.extend_from_slice(&buf[..count]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return all,
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn ends_with_the_same_key_talk_both_ways() {
    let files =
        files("other:00\nqemu:00112233445566778899aabbccddeeff\n", "qemu:00112233445566778899aabbccddeeff");
    for piece in [1, 7, 1 << 20] {
        let (mut client, mut server) = (client(&files.client, "qemu"), server(&files.server));
        assert_eq!(client.read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
        shake_hands(&mut client, &mut server, piece).unwrap();
        let text: Vec<u8> = (0..200_000u32).map(|number| (number % 251) as u8).collect();
        client.write_all(&text).unwrap();
        assert!(carry(&mut client, &mut server, piece).unwrap() > text.len());
        assert!(read_all(&mut server) == text);
        server.write_all(b"answer").unwrap();
        carry(&mut server, &mut client, piece).unwrap();
        assert_eq!(read_all(&mut client), b"answer");
        server.send_close_notify();
        carry(&mut server, &mut client, piece).unwrap();
        assert_eq!(client.read(&mut [0; 9]).unwrap(), 0);
        let (mut client, mut server) = (self::client(&files.client, "qemu"), self::server(&files.server));
        shake_hands(&mut client, &mut server, piece).unwrap();
        // The end of the network, without a farewell.
        assert_eq!(client.receive_from(&mut std::io::empty()).unwrap(), 0);
        assert_eq!(client.read(&mut [0]).unwrap_err().kind(), ErrorKind::UnexpectedEof);
    }
}

#[test]
fn nobody_is_let_in_with_another_key_or_identity() {
    for (ours, theirs) in [("qemu:00ff", "qemu:00fe"), ("somebody:00ff", "qemu:00ff")] {
        let files = files(ours, theirs);
        let (mut client, mut server) = (client(&files.client, "qemu"), server(&files.server));
        let error = shake_hands(&mut client, &mut server, 1 << 20).unwrap_err();
        assert!(!error.contains("no end"), "{error}");
        // The alert tells the client, who is not let in either.
        assert!(server.wants_to_send() && client.is_handshaking());
        carry(&mut server, &mut client, 1 << 20).unwrap_err();
        assert!(server.read(&mut [0]).is_err() && server.write_all(b"x").is_err());
    }
}

#[test]
fn a_server_with_a_certificate_in_place_of_the_key_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let made = std::process::Command::new("openssl")
        .args(
            "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout key.pem -out cert.pem"
                .split(' '),
        )
        .current_dir(directory.path())
        .output()
        .expect("openssl is missing: `cargo xtask setup` installs it");
    assert!(made.status.success());
    let files = files("qemu:00ff", "qemu:00ff");
    let certificate =
        rustls::pki_types::CertificateDer::from_pem_file(directory.path().join("cert.pem")).unwrap();
    let key = rustls::pki_types::PrivateKeyDer::from_pem_file(directory.path().join("key.pem")).unwrap();
    let config = rustls::ServerConfig::builder_with_provider(rustls::crypto::ring::default_provider().into())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .unwrap();
    let server = rustls::ServerConnection::new(config.into()).unwrap();
    let mut server = Session::Certificates(Box::new(server.into()));
    let mut client = client(&files.client, "qemu");
    assert!(shake_hands(&mut client, &mut server, 1 << 20).is_err());
    assert!(client.is_handshaking() && client.write_all(b"secret").is_err());
}

#[test]
fn bytes_that_are_no_tls_are_an_error() {
    let files = files("qemu:00ff", "qemu:00ff");
    for seed in 0..200u32 {
        let mut noise =
            (0..2000u32).map(|index| (index.wrapping_mul(seed * 2 + 1) ^ seed) as u8).collect::<Vec<_>>();
        if seed % 2 == 0 {
            // A record of a handshake, by its header.
            noise[..5].copy_from_slice(&[0x16, 3, 1, 2, 0]);
        }
        for mut end in [server(&files.server), client(&files.client, "qemu")] {
            let mut source = noise.as_slice();
            while end.receive_from(&mut source).unwrap() > 0 {}
            assert!(end.process().is_err(), "{seed}");
            assert!(end.process().is_err());
        }
    }
}

#[test]
fn an_identity_without_a_key_is_named() {
    let files = files("qemu:00ff", "qemu:00ff");
    let error = ClientConfig::from_file(&files.client, "alice").unwrap_err();
    assert!(matches!(error, PskError::NoKey { .. }) && error.to_string().contains("'alice'"), "{error}");
    let mut text = String::new();
    std::fs::File::open(&files.server).unwrap().read_to_string(&mut text).unwrap();
    assert!(!format!("{:?}", server(&files.server)).contains(text.trim()));
}

#[test]
fn writes_stop_while_much_waits_to_be_sent() {
    let files = files("qemu:00ff", "qemu:00ff");
    let (mut client, mut server) = (client(&files.client, "qemu"), server(&files.server));
    shake_hands(&mut client, &mut server, 1 << 20).unwrap();
    let large = vec![7; 1 << 20];
    let mut written = 0;
    while written < large.len() {
        let bufs = [&large[written..written + 10], &large[written + 10..]].map(std::io::IoSlice::new);
        let taken = client.write_vectored(&bufs).unwrap();
        assert!((1..=64 << 10).contains(&taken), "{taken}");
        written += taken;
        if written < large.len() {
            assert_eq!(client.write_vectored(&[std::io::IoSlice::new(b"x")]).unwrap(), 0);
        }
        carry(&mut client, &mut server, 1 << 20).unwrap();
    }
    assert!(read_all(&mut server) == large);
}

/// A command ends beside handshakes of further connections, and so may any program.
#[test]
fn a_program_may_end_beside_handshakes() {
    const KEYS: &str = "ZEBU_TEST_KEYS";
    let Some(path) = std::env::var_os(KEYS).map(PathBuf::from) else {
        let keys = files("qemu:00112233445566778899aabbccddeeff\n", "");
        for _ in 0..20 {
            let mut program = std::process::Command::new(std::env::current_exe().unwrap());
            program.args(["--exact", "a_program_may_end_beside_handshakes"]).env(KEYS, &keys.server);
            let ended = program.output().unwrap();
            assert!(ended.status.success(), "{}: {}", ended.status, String::from_utf8_lossy(&ended.stderr));
        }
        return;
    };
    let (ready, is_ready) = std::sync::mpsc::channel();
    for _ in 0..4 {
        let (path, ready) = (path.clone(), ready.clone());
        std::thread::spawn(move || {
            loop {
                let (mut client, mut server) = (client(&path, "qemu"), server(&path));
                shake_hands(&mut client, &mut server, usize::MAX).unwrap();
                let _ = ready.send(());
            }
        });
    }
    for _ in 0..4 {
        is_ready.recv().unwrap();
    }
    std::process::exit(0);
}
