//! Rules of the description of NBD that clients in good order seldom come to, one by one, by a client of our own.

use zebu_tests::nbd_client::{ACK, Client, ERROR, META_CONTEXT, command, option};
use zebu_tests::program::zebu;
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;

const SIZE: u64 = 64 << 20;
const INFO: u32 = 3;
const EINVAL: u32 = 22;
const EOVERFLOW: u32 = 75;
const POLICY: u32 = ERROR + 2;
const INVALID: u32 = ERROR + 3;
const UNKNOWN: u32 = ERROR + 6;
const STARTTLS: u32 = 5;
const DF_IS_OFFERED: u16 = 1 << 7;

fn serve(options: &str) -> (Scratch, Server) {
    let scratch = Scratch::new("nbd-rules");
    zebu(scratch.path(), ["create", "-q", "-f", "qcow2", "disk.qcow2", "64M"]).ok();
    let server = Server::start(scratch.path(), &format!("{options} -f qcow2 disk.qcow2"));
    (scratch, server)
}

/// A string after its length.
fn counted(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat()
}

/// All replies to an option, down to the final one.
fn replies(client: &mut Client, code: u32, data: &[u8]) -> Vec<(u32, Vec<u8>)> {
    client.option(code, data).unwrap();
    let mut all = Vec::new();
    loop {
        let (kind, data) = client.option_reply(code).unwrap();
        all.push((kind, data));
        if kind == ACK || kind & ERROR != 0 {
            return all;
        }
    }
}

/// Data of INFO and GO.
fn wish(export: &str, kinds: &[u16]) -> Vec<u8> {
    let mut data = counted(export);
    data.extend((kinds.len() as u16).to_be_bytes());
    data.extend(kinds.iter().flat_map(|kind| kind.to_be_bytes()));
    data
}

/// Data of LIST_META_CONTEXT and SET_META_CONTEXT.
fn queries(export: &str, names: &[&str]) -> Vec<u8> {
    let mut data = counted(export);
    data.extend((names.len() as u32).to_be_bytes());
    data.extend(names.iter().flat_map(|name| counted(name)));
    data
}

#[test]
fn info_and_go_say_the_same_and_what_was_asked_for() {
    let (_scratch, server) = serve("--export-name disk --description words");
    let mut client = Client::start(server.socket()).unwrap();
    // Kinds that nobody knows are ignored.
    for kinds in [&[][..], &[1], &[2], &[3], &[1, 2, 3], &[0, 77, 3]] {
        let infos = replies(&mut client, option::INFO, &wish("disk", kinds));
        let found: Vec<u16> = infos[..infos.len() - 1]
            .iter()
            .map(|(kind, data)| {
                assert_eq!(*kind, INFO);
                u16::from_be_bytes(data[..2].try_into().unwrap())
            })
            .collect();
        assert_eq!(infos.last().unwrap(), &(ACK, Vec::new()));
        let wanted: Vec<u16> = kinds.iter().copied().filter(|kind| (1..=3).contains(kind)).collect();
        assert_eq!(found, [&[0][..], &wanted].concat(), "{kinds:?}");
        let mut chooser = Client::start(server.socket()).unwrap();
        assert_eq!(replies(&mut chooser, option::GO, &wish("disk", kinds)), infos, "{kinds:?}");
        // Nothing but a reply follows: no zeroes.
        chooser.request(0, command::FLUSH, 7, 0, 0).unwrap();
        assert_eq!(chooser.reply().unwrap().cookie, 7);
    }
    let (kind, data) = &replies(&mut client, option::INFO, &wish("disk", &[3]))[1];
    let sizes: Vec<u32> = data[2..].chunks(4).map(|at| u32::from_be_bytes(at.try_into().unwrap())).collect();
    assert_eq!((*kind, sizes), (INFO, vec![1, 4096, 32 << 20]));
    let unknown = replies(&mut client, option::INFO, &wish("other", &[]));
    assert!(unknown.len() == 1 && unknown[0].0 == UNKNOWN, "{unknown:?}");
    let listed = replies(&mut client, option::LIST, b"");
    assert_eq!(listed, [(2, [counted("disk"), b"words".to_vec()].concat()), (ACK, Vec::new())]);
    server.stop();
}

#[test]
fn the_oldest_way_to_choose_an_export_pads_unless_the_client_says_no() {
    let (_scratch, server) = serve("");
    for (flags, padding) in [(1u32, 124), (3, 0)] {
        let mut client = Client::connect(server.socket()).unwrap();
        client.say(&flags.to_be_bytes()).unwrap();
        client.option(option::EXPORT_NAME, b"").unwrap();
        let chosen = client.take(10 + padding).unwrap();
        assert_eq!(chosen[..8], SIZE.to_be_bytes());
        assert!(chosen[10..].iter().all(|&byte| byte == 0));
        client.request(0, command::FLUSH, 5, 0, 0).unwrap();
        assert_eq!(client.reply().unwrap().cookie, 5);
    }
    server.stop();
}

#[test]
fn an_abort_is_answered_whatever_it_says() {
    let (_scratch, server) = serve("");
    for data in [&b""[..], b"words that mean nothing"] {
        let mut client = Client::start(server.socket()).unwrap();
        assert_eq!(client.ask(option::ABORT, data).unwrap(), (ACK, Vec::new()));
        assert!(client.is_closed());
    }
    server.stop();
}

#[test]
fn a_server_without_a_certificate_refuses_tls_as_its_policy() {
    let (_scratch, server) = serve("");
    let mut client = Client::start(server.socket()).unwrap();
    assert_eq!(client.ask(STARTTLS, b"").unwrap().0, POLICY);
    assert_eq!(client.ask(STARTTLS, b"data").unwrap().0, INVALID);
    client.go("").unwrap();
    server.stop();
}

#[test]
fn one_chunk_is_promised_with_structured_replies_only() {
    let (_scratch, server) = serve("");
    let mut client = Client::start(server.socket()).unwrap();
    let (_, flags) = client.go("").unwrap();
    assert_eq!(flags & DF_IS_OFFERED, 0);
    // Too long, without the error that belongs to such chunks.
    assert_eq!(client.call(0, command::READ, 0, (32 << 20) + 1).unwrap().error, EINVAL);
    let mut client = Client::start(server.socket()).unwrap();
    assert_eq!(client.ask(option::STRUCTURED_REPLY, b"").unwrap().0, ACK);
    let (_, flags) = client.go("").unwrap();
    assert_ne!(flags & DF_IS_OFFERED, 0);
    assert_eq!(client.call(1 << 2, command::READ, 0, (32 << 20) + 1).unwrap().error, EOVERFLOW);
    let whole = client.call(1 << 2, command::READ, 0, 32 << 20).unwrap();
    assert!(whole.done && whole.data.len() == 8 + (32 << 20), "one chunk");
    server.stop();
}

#[test]
fn contexts_are_listed_by_patterns_and_chosen_by_name_and_the_last_choice_counts() {
    let (_scratch, server) = serve("--export-name disk");
    let mut client = Client::start(server.socket()).unwrap();
    // Before structured replies.
    for code in [option::LIST_META_CONTEXT, option::SET_META_CONTEXT] {
        assert_eq!(client.ask(code, &queries("disk", &["base:allocation"])).unwrap().0, INVALID);
    }
    assert_eq!(client.ask(option::STRUCTURED_REPLY, b"").unwrap().0, ACK);
    let mut names = |code: u32, queries: Vec<u8>| {
        let all = replies(&mut client, code, &queries);
        let (last, contexts) = all.split_last().unwrap();
        assert_eq!(last.0, ACK);
        let name = |(kind, data): &(u32, Vec<u8>)| {
            assert_eq!(*kind, META_CONTEXT);
            String::from_utf8(data[4..].to_vec()).unwrap()
        };
        contexts.iter().map(name).collect::<Vec<_>>()
    };
    let (allocation, depth) = ("base:allocation", "qemu:allocation-depth");
    assert_eq!(names(option::LIST_META_CONTEXT, queries("disk", &[])), [allocation, depth]);
    assert_eq!(names(option::LIST_META_CONTEXT, queries("disk", &["base:"])), [allocation]);
    assert_eq!(names(option::LIST_META_CONTEXT, queries("disk", &["x-other:", "y:z"])), [""; 0]);
    assert_eq!(names(option::SET_META_CONTEXT, queries("disk", &[allocation, depth])), [allocation, depth]);
    // A pattern chooses nothing, and what was chosen before is over.
    assert_eq!(names(option::SET_META_CONTEXT, queries("disk", &["base:"])), [""; 0]);
    client.go("disk").unwrap();
    assert_eq!(client.call(0, command::BLOCK_STATUS, 0, 4096).unwrap().error, EINVAL);
    // So it is if the choice fails.
    let mut client = Client::start(server.socket()).unwrap();
    assert_eq!(client.ask(option::STRUCTURED_REPLY, b"").unwrap().0, ACK);
    assert_eq!(client.contexts("disk", &[allocation]).unwrap().len(), 1);
    assert_eq!(client.ask(option::SET_META_CONTEXT, &queries("other", &[allocation])).unwrap().0, UNKNOWN);
    client.go("disk").unwrap();
    assert_eq!(client.call(0, command::BLOCK_STATUS, 0, 4096).unwrap().error, EINVAL);
    server.stop();
}

#[test]
fn a_client_that_disconnects_gets_what_is_outstanding() {
    const REQUESTS: u64 = 32;
    let (_scratch, server) = serve("--queues 2");
    for _ in 0..20 {
        let mut client = Client::open(server.socket(), "").unwrap();
        let mut bytes = Vec::new();
        for cookie in 0..REQUESTS {
            bytes.extend(client.header(1, command::WRITE, cookie, cookie << 16, 4096));
            bytes.extend([9; 4096]);
        }
        bytes.extend(client.header(0, command::DISCONNECT, 99, 0, 0));
        client.say(&bytes).unwrap();
        let mut cookies: Vec<u64> = (0..REQUESTS).map(|_| client.reply().unwrap().cookie).collect();
        cookies.sort_unstable();
        assert_eq!(cookies, (0..REQUESTS).collect::<Vec<_>>());
        assert!(client.is_closed(), "the disconnection has no reply");
    }
    server.stop();
}

#[test]
fn requests_of_no_bytes_end_no_session() {
    let (_scratch, server) = serve("");
    let mut client = Client::start(server.socket()).unwrap();
    assert_eq!(client.ask(option::STRUCTURED_REPLY, b"").unwrap().0, ACK);
    client.contexts("", &["base:allocation"]).unwrap();
    client.go("").unwrap();
    for (command, error) in [
        (command::READ, 0),
        (command::TRIM, 0),
        (command::CACHE, 0),
        (command::WRITE_ZEROES, 0),
        // There is no extent that could be told.
        (command::BLOCK_STATUS, EINVAL),
    ] {
        for offset in [0, SIZE] {
            assert_eq!(client.call(0, command, offset, 0).unwrap().error, error, "command {command}");
        }
    }
    assert_eq!(client.read(0, 512).unwrap(), [0; 512]);
    server.stop();
}

#[test]
fn texts_that_the_protocol_has_no_room_for_are_refused() {
    let (scratch, server) = serve("");
    server.stop();
    let long = "x".repeat(4097);
    for (option, expected) in [("--description", "description"), ("--export-name", "name")] {
        let words = ["serve", "--nbd", "unix:s", option, &long, "-f", "qcow2", "disk.qcow2"];
        let refused = zebu(scratch.path(), words).exits(1);
        assert!(refused.stderr.contains("4096 bytes") && refused.stderr.contains(expected), "{refused}");
    }
}
