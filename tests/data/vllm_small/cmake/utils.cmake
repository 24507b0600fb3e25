# As upstream's functions are called; what they are given is all that counts here.
function(set_gencode_flags_for_srcs)
endfunction()
